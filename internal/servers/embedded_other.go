//go:build !linux && !darwin

package servers

import (
	"context"
	"errors"
)

func postgresBinaries(context.Context) (string, error) {
	return "", errors.New("there are no binaries of PostgreSQL for this system: set DATABASE_URL, or start a Docker engine")
}

func createCluster(context.Context, string, string, []string) (external, error) {
	return external{}, errors.ErrUnsupported // never reached: there are no binaries
}
