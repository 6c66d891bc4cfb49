package servers

import (
	"context"
	"errors"
)

// LaunchBeside lets another process take the first ports, and returns how many were tried.
func LaunchBeside(ctx context.Context, taken int) (tried int, err error) {
	var last *Server
	err = launch(ctx, func(int) (*Server, error) {
		tried++
		last = &Server{backend: external, ready: func(context.Context) error { return nil }}
		if tried <= taken {
			last.backend = collision{}
		}
		return last, nil
	})
	return tried, errors.Join(err, last.Stop(ctx))
}

type collision struct{ outside }

func (collision) start(context.Context) error {
	return errors.New(`bind 127.0.0.1: Address already in use`)
}
