//go:build unix && !linux

package demo

import "syscall"

// dieWithParent has nothing to set on this system: the child notices that its standard input ends.
func dieWithParent(*syscall.SysProcAttr) {}
