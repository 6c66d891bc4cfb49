//go:build unix && !linux

package demo

import "syscall"

// dieWithParent has nothing to set here: the child notices that its standard input ends.
func dieWithParent(*syscall.SysProcAttr) {}
