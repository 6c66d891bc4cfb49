//go:build !linux

package main

import "errors"

var errNoLinux = errors.New("it needs Linux, where a process of Java ends with the run, however that ends")

func canReplace() error { return errNoLinux }

func replace(string, ...string) error { return errNoLinux }
