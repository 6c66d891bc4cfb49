//go:build !unix

package fleet

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"time"
)

var errUnsupported = errors.New("this command freezes and resumes processes, and " + runtime.GOOS + " has no signals for that")

// Supported reports whether this system has the signals that a fleet needs.
func Supported() error {
	return fmt.Errorf("%w: run it on Linux or macOS, or inside WSL or a container", errUnsupported)
}

func isolate(*exec.Cmd) {}

func freeze(*os.Process) error { return errUnsupported }

func resume(*os.Process) error { return errUnsupported }

func terminate(p *os.Process) error { return p.Kill() }

// FreezeSelf does nothing on this system.
func FreezeSelf(context.Context, time.Duration) {}
