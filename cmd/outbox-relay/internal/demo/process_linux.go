package demo

import "syscall"

// dieWithParent makes the kernel kill the child when the thread that started it ends. So no child
// remains, even if the parent gets SIGKILL or the child is frozen at that moment.
func dieWithParent(attr *syscall.SysProcAttr) { attr.Pdeathsig = syscall.SIGKILL }
