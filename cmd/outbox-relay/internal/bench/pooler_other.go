//go:build !unix

package bench

import "context"

type pgBouncer struct {
	version  string
	prepares bool
}

// startPooler returns none on this system.
func startPooler(context.Context, string) (*pgBouncer, error) { return nil, nil }

func (p *pgBouncer) address(string) string { return "" }

func (p *pgBouncer) stop() {}
