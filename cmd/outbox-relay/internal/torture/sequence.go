package torture

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/ledger"
	"github.com/effectonce/effectonce/internal/pause"
	"github.com/effectonce/effectonce/relay"
)

// repairMax bounds how long the operator tries to repair the sequence: transactions may be open, and
// the database away.
const repairMax = 30 * time.Second

// setBackSQL sets the sequence of the outbox's rows back by at most $1.
const setBackSQL = `-- torture.sequence_back
SELECT setval('effectonce.outbox_seq_seq', greatest(1, last_value - $1), false) FROM effectonce.outbox_seq_seq`

const restartSQL = `-- torture.sequence_restart
ALTER SEQUENCE effectonce.outbox_seq_seq RESTART`

// Half of the time the relays have to wait for the operator.
const (
	mayNotRepairSQL = `REVOKE EXECUTE ON FUNCTION effectonce.repair_outbox_sequences(bigint, bigint) FROM effectonce_relay`
	mayRepairSQL    = `GRANT EXECUTE ON FUNCTION effectonce.repair_outbox_sequences(bigint, bigint) TO effectonce_relay`
)

// sequenceBack sets the sequence back. It is repaired by a relay, or, where these may not, by the
// operator.
func (n *nemesis) sequenceBack(ctx context.Context, f Fault, random *rand.Rand) (what string, err error) {
	n.sequence.Lock() // rights are changed by one at a time
	defer n.sequence.Unlock()
	late := context.WithoutCancel(ctx)
	if err := n.untilRepaired(late); err != nil { // a logical copy may have set it back
		return "", err
	}
	if err := n.ledger.Write(ledger.SequenceBack); err != nil {
		return "", err
	}
	heal := n.untilRepaired
	if random.IntN(2) == 0 {
		what = "repaired by the operator"
		if _, err := n.pool.Exec(ctx, mayNotRepairSQL); err != nil {
			return what, err
		}
		heal = func(ctx context.Context) error {
			return errors.Join(n.operator.repair(ctx), n.untilDone(ctx, mayRepairSQL))
		}
	}
	defer func() { err = errors.Join(err, heal(late)) }()
	if random.IntN(4) == 0 {
		_, err = n.pool.Exec(ctx, restartSQL)
		what = "to its start, " + what
	} else {
		by := 1 + random.Int64N(pick(random, int64(10), 1000, 100_000))
		_, err = n.pool.Exec(ctx, setBackSQL, by)
		what = fmt.Sprintf("by %d, %s", by, what)
	}
	pause.For(ctx, f.For)
	return what, err
}

var errNotRepaired = fmt.Errorf("the outbox's sequence is not repaired after %v", repairMax)

// untilRepaired waits, for a while, until the sequence is ahead again: numbers that are set back twice
// without a repair between do not tell the order of the rows.
func (n *nemesis) untilRepaired(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, repairMax)
	defer cancel()
	for {
		state, err := relay.ReadSequences(ctx, n.pool, "")
		if err == nil && !state.Behind {
			return nil
		}
		if !pause.For(ctx, 100*time.Millisecond) {
			return errors.Join(errNotRepaired, err)
		}
	}
}

// repair is what the log of a relay asks for that may not repair the sequence.
func (o *operator) repair(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, repairMax)
	defer cancel()
	for {
		err := o.command(ctx, "repair", "--why", "torture")
		if err == nil || errors.Is(err, errWrongUse) || !pause.For(ctx, 200*time.Millisecond) {
			return err
		}
	}
}

// untilDone tries a statement until the database is there.
func (n *nemesis) untilDone(ctx context.Context, sql string) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		_, err := n.pool.Exec(ctx, sql)
		if err == nil || !pause.For(ctx, 200*time.Millisecond) {
			return err
		}
	}
}
