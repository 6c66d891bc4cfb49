//go:build !linux && !darwin

package servers

import (
	"context"
	"errors"
	"time"
)

func postgresBinaries(context.Context) (string, error) {
	return "", errors.New("there are no PostgreSQL binaries for this system: set DATABASE_URL, or start a Docker engine")
}

func createCluster(_ context.Context, _, _ string, _ []string, _ time.Duration) (external, error) {
	return external{}, errors.ErrUnsupported // never reached: there are no binaries
}

// StartStandby needs PostgreSQL binaries, which there are none of for this system.
func StartStandby(context.Context, *Postgres) (*Postgres, error) { return nil, errors.ErrUnsupported }

// StartPooler needs what is done here for Unix only.
func StartPooler(context.Context, PoolerOptions) (*Pooler, error) { return nil, errors.ErrUnsupported }

// Log is empty: there are no poolers.
func (p *Pooler) Log() string { return "" }
