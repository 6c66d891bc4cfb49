package torture

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/ledger"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/scene"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/worker"
	"github.com/effectonce/effectonce/dedup"
)

// lateCopiesMax bounds the copies of one fault, and lateReadMax the search for them.
const (
	lateCopiesMax = 40
	lateReadMax   = 3 * time.Second
)

// lateCopies publishes again what has an ID that is days old: the claims of most of it are forgotten.
// Half of the copies keep the time of the first record.
func (n *nemesis) lateCopies(ctx context.Context, random *rand.Rand) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, lateReadMax)
	defer cancel()
	partition := int32(random.IntN(n.plan.Scene.Partitions))
	ends, err := n.admin.ListEndOffsets(ctx, n.name)
	if err != nil {
		return "", err
	}
	end, ok := ends.Lookup(n.name, partition)
	if !ok || end.Err != nil || end.Offset == 0 {
		return "", errSkipped
	}
	begin := random.Int64N(end.Offset)
	reader, err := kgo.NewClient(kgo.SeedBrokers(n.arena.kafka.Brokers...), kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{
		n.name: {partition: kgo.NewOffset().At(begin / 2)},
	}), kgo.FetchIsolationLevel(kgo.ReadCommitted()))
	if err != nil {
		return "", err
	}
	defer reader.Close()
	var again []*kgo.Record
	for at := int64(0); at < end.Offset-1 && len(again) < lateCopiesMax; {
		fetches := reader.PollFetches(ctx)
		if ctx.Err() != nil {
			break
		}
		fetches.EachRecord(func(r *kgo.Record) {
			at = r.Offset
			if len(again) >= lateCopiesMax || !isOld(idOf(r)) {
				return
			}
			copied := &kgo.Record{Topic: r.Topic, Partition: r.Partition, Key: r.Key, Value: r.Value, Headers: r.Headers}
			if random.IntN(2) == 0 {
				copied.Timestamp = r.Timestamp
			}
			again = append(again, copied)
		})
	}
	if len(again) == 0 {
		return "", errSkipped
	}
	for _, r := range again {
		if err := n.ledger.Write(ledger.Copied, idOf(r)); err != nil {
			return "", err
		}
	}
	late, stop := context.WithTimeout(context.WithoutCancel(ctx), lateReadMax)
	defer stop()
	return strconv.Itoa(len(again)) + " records of partition " + strconv.Itoa(int(partition)), n.client.ProduceSync(late, again...).FirstErr()
}

func idOf(r *kgo.Record) string {
	at := slices.IndexFunc(r.Headers, func(h kgo.RecordHeader) bool { return h.Key == "message-id" })
	if at < 0 {
		return ""
	}
	return string(r.Headers[at].Value)
}

// isOld reports whether an ID is from a day before those of the round.
func isOld(text string) bool {
	id, err := uuid.Parse(text)
	if err != nil {
		return false
	}
	at, timed := dedup.Time(id)
	return timed && time.Since(at) > day
}

// retryParked hands back what is parked, but what may have been handled before, and what has another
// content than the message that was handled under its ID: a retry would let it take effect. Both need a decision
// for each message.
func (o *operator) retryParked(ctx context.Context) error {
	rows, _ := o.pool.Query(ctx, `-- torture.reasons
SELECT DISTINCT reason FROM effectonce.parked_messages WHERE state = 'parked' AND reason NOT IN ('expired', 'conflict') ORDER BY 1`)
	reasons, err := pgx.CollectRows(rows, pgx.RowTo[string])
	for _, reason := range reasons {
		err = errors.Join(err, o.command(ctx, "parked", "retry", "--reason", reason, "--why", "torture"))
	}
	return err
}

// expired is the first parked message of its key, which may have been handled before.
type expired struct {
	ID, Group string
	Payload   []byte
	Only      bool // no copy of it was parked before it
}

const expiredSQL = `-- torture.expired
SELECT p.topic || '/' || p.partition || '/' || p."offset" AS id, c.consumer_group, p.payload, NOT EXISTS (SELECT FROM effectonce.parked_messages e
  WHERE e.consumer = p.consumer AND e.message_id = p.message_id AND e.seq < p.seq) AS only
FROM effectonce.parked_messages p JOIN effectonce.consumers c ON c.id = p.consumer
WHERE p.state = 'parked' AND p.reason = 'expired' ORDER BY p.seq`

const handledSQL = `-- torture.handled
SELECT DISTINCT order_id FROM shop.effects WHERE grp = $1 AND order_id = ANY ($2::bigint[])`

// decideExpired decides as docs/runbook.md says: what has its effect is discarded, what has none is
// retried. Of several copies the first one is retried, and the others wait for its effect.
func (o *operator) decideExpired(ctx context.Context) (string, error) {
	o.deciding.Lock()
	defer o.deciding.Unlock()
	rows, _ := o.pool.Query(ctx, expiredSQL)
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[expired])
	if err != nil {
		return "", err
	}
	retried, discarded := 0, 0
	var failed error // it may be handled meanwhile
	for _, g := range o.plan.Scene.Groups {
		orders, err := o.expiredOrders(ctx, g, all)
		if err != nil {
			return "", err
		}
		for order, p := range orders {
			if err := o.ledger.Write(ledger.Expired, g.Number, order); err != nil {
				return "", err
			}
			words := []string{"parked", "retry"}
			if p.handled {
				words[1] = "discard"
				discarded++
			} else {
				retried++
			}
			if err := o.command(ctx, append(words, "--id", p.ID, "--group", p.Group, "--why", "torture")...); err != nil {
				failed = errors.Join(failed, err)
			}
		}
	}
	return fmt.Sprintf("%d retried, %d discarded", retried, discarded), failed
}

// decidable is a message for which there is a decision.
type decidable struct {
	expired

	handled bool
}

// expiredOrders returns the messages of a group for which there is a decision, by order.
func (o *operator) expiredOrders(ctx context.Context, g scene.Group, all []expired) (map[int64]decidable, error) {
	found := map[int64]decidable{}
	var ids []int64
	for _, p := range all {
		var b scene.Body
		if p.Group != (worker.Job{Topic: o.name}).GroupID(g.Number) || json.Unmarshal(p.Payload, &b) != nil || b.Forged {
			continue
		}
		if _, known := found[b.Order]; !known {
			found[b.Order] = decidable{expired: p}
			ids = append(ids, b.Order)
		}
	}
	if len(ids) == 0 {
		return nil, nil
	}
	rows, _ := o.pool.Query(ctx, handledSQL, g.Number, ids)
	handled, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil {
		return nil, err
	}
	for _, order := range handled {
		found[order] = decidable{expired: found[order].expired, handled: true}
	}
	for order, p := range found {
		if !p.handled && !p.Only {
			delete(found, order)
		}
	}
	return found, nil
}
