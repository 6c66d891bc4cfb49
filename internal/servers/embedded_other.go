//go:build !linux && !darwin

package servers

import (
	"context"
	"errors"
)

func postgresBinaries(context.Context) (string, error) {
	return "", errors.New("there are no PostgreSQL binaries for this system: set DATABASE_URL, or start a Docker engine")
}

func createCluster(_ context.Context, _, _ string, _ []string, _ PostgresOptions) (outside, error) {
	return external, errors.ErrUnsupported // never reached: there are no binaries
}
