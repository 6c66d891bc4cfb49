package integration_test

import (
	"context"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup"
)

// upkeep forgets claims, for a consumer that has been registered and has not consumed yet, so that
// the oldest days of a new schema may go, whatever the time of day is.
func (c child) upkeep(ctx context.Context, pool *pgxpool.Pool) error {
	claims, err := dedup.New(dedup.Config{})
	if err != nil {
		return err
	}
	if _, err := claims.Register(ctx, pool, dedup.Registration{Name: "other", Group: "other", Topics: []string{"other"}, Window: 24 * time.Hour}); err != nil {
		return err
	}
	_, err = claims.Maintain(ctx, pool, dedup.MaintainOptions{Owner: "upkeep"})
	return err
}

// Property: a process that freezes while it forgets old claims, with the table of claims locked,
// holds consumers up for a moment only, and when it wakes up it changes nothing. Rows C9, C30 of
// guarantees.md.
func TestFrozenUpkeepDoesNotHoldUpClaims(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	c, pool := consuming(t, child{}, 1)
	zombie := start(t, child{Role: "upkeep", URL: c.URL, FreezeSQL: "DETACH PARTITION"})
	eventually(t, "the upkeep freezes", func() (bool, any) {
		select {
		case <-zombie.done:
			require.Fail(t, "the upkeep had nothing to forget")
		default:
		}
		return frozen(zombie), zombie.log
	})
	heir := start(t, c)
	producedAt(t, c.Brokers, pool, c.Topic, "k", 4, 50, 0)
	eventually(t, "every message has its effect", effectsOfAll(ctx, t, pool))
	zombie.signal(syscall.SIGCONT)
	<-zombie.done
	require.Error(t, zombie.err, "its connection is gone")
	require.NoError(t, heir.terminate())
	handled(ctx, t, pool)
}
