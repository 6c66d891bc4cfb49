package torture

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kadm"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/ledger"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/scene"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/worker"
	"github.com/effectonce/effectonce/internal/pause"
)

// operator uses the command line.
type operator struct {
	*site

	program []string
	plan    Plan
	ledger  *ledger.Writer
	gone    map[int16]int64 // by group: messages that were discarded
	pausing sync.Mutex      // the topic: one pause at a time, so that none is resumed by another

	deciding sync.Mutex // two decisions about copies of one message would be made by the same facts
}

// exitWrongUse of the command line: what this package asked is wrong.
const exitWrongUse = 2

var errWrongUse = errors.New("wrong use of the command line")

// command runs one command. Failures are part of life: the servers may be away.
func (o *operator) command(ctx context.Context, words ...string) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, o.program[0], append(o.program[1:], words...)...) //nolint:gosec // this program
	address := o.databaseURL                                                          // of the owner
	if words[0] != "prune" && words[0] != "migrate" {
		var err error
		if address, err = o.as("operator"); err != nil {
			return err
		}
	}
	cmd.Env = append(os.Environ(), "OUTBOX_DATABASE_URL="+address, "OUTBOX_BROKERS="+strings.Join(o.arena.kafka.Brokers, ","), "OUTBOX_INSECURE=true")
	output, err := cmd.CombinedOutput()
	var status *exec.ExitError
	if errors.As(err, &status) && status.ExitCode() == exitWrongUse {
		err = fmt.Errorf("%w: %v: %s", errWrongUse, words, output)
	} else if err != nil {
		err = fmt.Errorf("%w: %s", err, lastLine(output))
	}
	return err
}

func lastLine(output []byte) string {
	lines := strings.Split(strings.TrimSpace(string(output)), "\n")
	return lines[len(lines)-1]
}

func (o *operator) carryOut(ctx context.Context, f Fault, random *rand.Rand) (what string, err error) {
	late := context.WithoutCancel(ctx)
	switch f.Kind {
	case "pause-topic":
		return o.name, o.pauseTopic(ctx, f.For)
	case "pause-group":
		group, topic := o.subscription(ctx, random)
		if group == "" {
			return "", errSkipped
		}
		err = o.command(ctx, "consumer", "pause", "--group", group, "--topic", topic, "--why", "torture")
		pause.For(ctx, f.For)
		again := o.command(late, "consumer", "resume", "--group", group, "--topic", topic)
		return group, errors.Join(err, again)
	case "move-back":
		return o.moveBack(ctx, random)
	case "retry-parked":
		return "", o.retryParked(ctx)
	case "decide-expired":
		return o.decideExpired(ctx)
	case "retry-dead":
		err = o.command(ctx, "dead", "retry", "--all", "--why", "torture")
		return "", err
	case "reshard":
		shards := strconv.Itoa(1 + random.IntN(4))
		err = o.command(ctx, "shards", shards, "--why", "torture")
		return shards, err
	case "prune", "forget-claims":
		err = o.command(ctx, "prune")
		return "", err
	case "migrate":
		err = o.command(ctx, "migrate", "up")
		return "", err
	case "replay":
		if err := o.ledger.Write(ledger.Replayed); err != nil {
			return "", err
		}
		err = o.command(ctx, "replay", "--from", time.Now().Add(-3*time.Second).UTC().Format(time.RFC3339), "--topic", o.name, "--why", "torture")
		return "", err
	default:
		return "", fmt.Errorf("unknown kind of fault %q", f.Kind)
	}
}

// pauseTopic pauses the topic of orders for a while. Once the pause is confirmed, nothing may arrive.
func (o *operator) pauseTopic(ctx context.Context, lasts time.Duration) (err error) {
	if !o.pausing.TryLock() {
		return errSkipped
	}
	defer o.pausing.Unlock()
	late := context.WithoutCancel(ctx)
	defer func() { err = errors.Join(err, o.resumeTopic(late)) }()
	err = o.command(ctx, "topics", "pause", o.name, "--why", "torture")
	before, _ := o.admin.ListEndOffsets(ctx, o.name)
	pause.For(ctx, lasts)
	after, ended := o.admin.ListEndOffsets(late, o.name)
	if err != nil || ended != nil {
		return errors.Join(err, ended)
	}
	before.Each(func(from kadm.ListedOffset) {
		to, ok := after.Lookup(from.Topic, from.Partition)
		if ok && from.Err == nil && to.Err == nil && to.Offset > from.Offset {
			err = errors.Join(err, o.ledger.Write(ledger.Paused, from.Partition, from.Offset, to.Offset))
		}
	})
	return err
}

// subscription draws a group and its topic.
func (o *operator) subscription(ctx context.Context, random *rand.Rand) (group, topic string) {
	rows, _ := o.pool.Query(ctx, `SELECT DISTINCT consumer_group, topic FROM effectonce.consumer_positions ORDER BY 1, 2`)
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[struct{ Group, Topic string }])
	if err != nil || len(all) == 0 {
		return "", ""
	}
	chosen := pick(random, all...)
	return chosen.Group, chosen.Topic
}

// moveBack makes a partition repeat some of its last messages.
func (o *operator) moveBack(ctx context.Context, random *rand.Rand) (string, error) {
	o.offsets.Lock()
	defer o.offsets.Unlock()
	rows, _ := o.pool.Query(ctx, `SELECT consumer_group, topic, partition, next_offset FROM effectonce.consumer_positions WHERE next_offset > 0 ORDER BY 1, 2, 3`)
	type position struct {
		Group, Topic string
		Partition    int32
		Next         int64
	}
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[position])
	if err != nil {
		return "", err
	}
	if len(all) == 0 {
		return "", errSkipped
	}
	p := pick(random, all...)
	at := max(0, p.Next-1-random.Int64N(2000))
	if err := o.ledger.Write(ledger.Moved, p.Group, p.Topic, p.Partition); err != nil {
		return "", err
	}
	err = o.command(ctx, "consumer", "resume-at", "--group", p.Group, "--topic", p.Topic,
		"--partition", strconv.Itoa(int(p.Partition)), "--at", strconv.FormatInt(at, 10), "--why", "torture")
	return fmt.Sprintf("%s %s/%d to %d", p.Group, p.Topic, p.Partition, at), err
}

func (o *operator) resumeTopic(ctx context.Context) error {
	err := o.command(ctx, "topics", "resume", o.name)
	return err
}

// heal ends all pauses.
func (o *operator) heal(ctx context.Context) error {
	var paused int
	if err := o.pool.QueryRow(ctx, `SELECT count(*) FROM effectonce.consumer_pauses`).Scan(&paused); err != nil {
		return err
	}
	if paused > 0 {
		rows, _ := o.pool.Query(ctx, `SELECT consumer_group, topic FROM effectonce.consumer_pauses`)
		all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[struct{ Group, Topic string }])
		if err != nil {
			return err
		}
		for _, p := range all {
			if err := o.command(ctx, "consumer", "resume", "--group", p.Group, "--topic", p.Topic); err != nil {
				return err
			}
		}
	}
	return o.resumeTopic(ctx)
}

// settle hands back what is parked and dead, and discards what can never be handled.
func (o *operator) settle(ctx context.Context) error {
	if err := o.command(ctx, "dead", "retry", "--all", "--why", "torture"); errors.Is(err, errWrongUse) {
		return err
	}
	if err := o.discard(ctx); err != nil {
		return err
	}
	if _, err := o.decideExpired(ctx); errors.Is(err, errWrongUse) {
		return err
	}
	if err := o.retryParked(ctx); errors.Is(err, errWrongUse) {
		return err
	}
	return nil
}

// discard discards the messages at the head of their queue that can never be handled.
func (o *operator) discard(ctx context.Context) error {
	rows, _ := o.pool.Query(ctx, `-- torture.hopeless
SELECT p.topic || '/' || p.partition || '/' || p."offset", c.consumer_group, p.payload
FROM effectonce.parked_messages p JOIN effectonce.consumers c ON c.id = p.consumer WHERE p.state = 'parked'`)
	type parked struct {
		ID, Group string
		Payload   []byte
	}
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[parked])
	if err != nil {
		return err
	}
	for _, p := range all {
		name, yes := hopeless(p.Payload)
		if !yes {
			continue
		}
		for _, g := range o.plan.Scene.Groups {
			if (worker.Job{Topic: o.name}).GroupID(g.Number) != p.Group {
				continue
			}
			if err := o.command(ctx, "parked", "discard", "--id", p.ID, "--group", p.Group, "--why", "torture"); err != nil {
				if errors.Is(err, errWrongUse) {
					return err
				}
				continue
			}
			if name == "" { // garbage
				continue
			}
			if err := o.ledger.Write(ledger.Discarded, g.Number, name); err != nil {
				return err
			}
			if !strings.HasPrefix(name, scene.ForgedPrefix) {
				o.gone[g.Number]++
			}
		}
	}
	return nil
}
