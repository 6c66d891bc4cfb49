package demo

import "syscall"

// dieWithParent lets the kernel kill the child when the thread that started it ends, so that none is
// left behind even where the parent gets SIGKILL, and where the child is frozen at that moment.
func dieWithParent(attr *syscall.SysProcAttr) { attr.Pdeathsig = syscall.SIGKILL }
