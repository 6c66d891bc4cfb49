package consumers

import (
	"context"
	"errors"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"

	"github.com/effectonce/effectonce/internal/pause"
)

// How long, and in which steps, requests to group coordinators are repeated: a broker that has just
// started first creates or loads its __consumer_offsets.
const (
	coordinatorWait = 5 * time.Second
	coordinatorStep = 100 * time.Millisecond
)

// AskCoordinators repeats ask while a group coordinator is not available yet, for at most 5 s. It
// returns ask's last error. The clients of the command line do not retry on their own, so that an
// error is shown and not a timeout.
func AskCoordinators(ctx context.Context, ask func() error) error {
	for waited := time.Duration(0); ; waited += coordinatorStep {
		err := ask()
		if !CoordinatorStarts(err) || waited >= coordinatorWait || !pause.For(ctx, coordinatorStep) {
			return err
		}
	}
}

// CoordinatorStarts reports whether an error is of a group coordinator that becomes available
// without intervention.
func CoordinatorStarts(err error) bool {
	return errors.Is(err, kerr.CoordinatorNotAvailable) || errors.Is(err, kerr.CoordinatorLoadInProgress) || errors.Is(err, kerr.NotCoordinator)
}
