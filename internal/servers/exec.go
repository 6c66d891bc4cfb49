package servers

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/testcontainers/testcontainers-go/exec"
)

// errNoContainer is Exec's error for a server that this program did not start, or that runs in this
// process.
var errNoContainer = errors.New("the server does not run in a container that this program started")

// Exec runs a command in the server's container and returns both of its outputs.
func (s *Server) Exec(ctx context.Context, command ...string) ([]byte, error) {
	container, ok := s.backend.(*dockerContainer)
	if !ok {
		return nil, fmt.Errorf("run %s: %w", command[0], errNoContainer)
	}
	status, output, err := container.Exec(ctx, command, exec.Multiplexed())
	if err != nil {
		return nil, fmt.Errorf("run %s: %w", command[0], err)
	}
	text, err := io.ReadAll(output)
	if err == nil && status != 0 {
		err = fmt.Errorf("exit status %d:\n%s", status, tail(text))
	}
	if err != nil {
		return text, fmt.Errorf("run %s: %w", command[0], err)
	}
	return text, nil
}
