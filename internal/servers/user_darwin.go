package servers

import (
	"errors"
	"os"
)

func asOrdinaryUser(f func() error) error {
	if os.Geteuid() == 0 {
		return errors.New("PostgreSQL refuses to run as root: run this as an ordinary user")
	}
	return f()
}
