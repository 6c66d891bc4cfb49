//go:build !unix

package demo

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
)

var errUnsupported = errors.New("the demo freezes and resumes processes, and " + runtime.GOOS + " has no signals for that")

func supported() error {
	return fmt.Errorf("%w: run it on Linux or macOS, or inside WSL or a container", errUnsupported)
}

func isolate(*exec.Cmd) {}

func freeze(*os.Process) error { return errUnsupported }

func resume(*os.Process) error { return errUnsupported }

func terminate(p *os.Process) error { return p.Kill() }
