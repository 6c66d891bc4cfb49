package judge

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/topicscan"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/ledger"
)

// ReadLedgers reads what was written outside of the system.
func (e *Evidence) ReadLedgers(dir string) error {
	e.Struck, e.Frozen, e.Forged = map[string]int{}, map[string]int{}, map[int64]struct{}{}
	e.Grown = map[string]bool{}
	e.Calls, e.Copied, e.Discarded, e.Garbage = map[string]map[string]int{}, map[string]int{}, map[string]struct{}{}, map[string]struct{}{}
	return ledger.Read(dir, func(words []string) error {
		if len(words) == 0 {
			return fmt.Errorf("an empty line")
		}
		return e.line(words[0], words[1:])
	})
}

func (e *Evidence) line(what string, words []string) error {
	want := map[string]int{
		ledger.Acked: 3, ledger.Unknown: 2, ledger.Undone: 2, ledger.Called: 2, ledger.Request: 3, ledger.Position: 4, ledger.Moved: 3,
		ledger.Discarded: 2, ledger.Copied: 1, ledger.Asked: 1, ledger.Garbage: 1, ledger.Struck: 2, ledger.Forged: 1, ledger.Paused: 3, ledger.Frozen: 1, ledger.Replayed: 0, ledger.LostCommits: 0,
		ledger.Resumed: 5, ledger.Rewound: 5, ledger.Grown: 1,
		ledger.Expired: 2, ledger.SequenceBack: 0, ledger.Restored: 0,
	}
	if n, known := want[what]; !known || n != len(words) {
		return fmt.Errorf("a line that this judge does not know: %s %v", what, words)
	}
	numbers := make([]int64, len(words))
	for i, word := range words {
		numbers[i], _ = strconv.ParseInt(word, 10, 64) // 0 where the word is no number
	}
	switch what {
	case ledger.Acked:
		e.Acked = append(e.Acked, Batch{numbers[0], numbers[1], numbers[2]})
	case ledger.Unknown:
		e.Unknown = append(e.Unknown, Batch{First: numbers[0], Count: numbers[1]})
	case ledger.Undone:
		e.Undone = append(e.Undone, Batch{First: numbers[0], Count: numbers[1]})
	case ledger.Called:
		if e.Calls[words[1]] == nil {
			e.Calls[words[1]] = map[string]int{}
		}
		e.Calls[words[1]][words[0]]++
	case ledger.Request:
		e.Answers = append(e.Answers, Answer{Key: words[0], Status: int(numbers[1]), Order: words[2]})
	case ledger.Position:
		e.Moves = append(e.Moves, Move{Partition: strings.Join(words[:3], "/"), Next: numbers[3]})
	case ledger.Moved:
		e.Moves = append(e.Moves, Move{Partition: strings.Join(words, "/"), Ordered: true})
		// The operator's order counts, and not the offset in Kafka that was set back before it.
		e.Rewinds = slices.DeleteFunc(e.Rewinds, func(r Resume) bool {
			return r.Group == words[0] && r.Topic == words[1] && strconv.Itoa(int(r.Partition)) == words[2]
		})
	case ledger.Resumed:
		e.Resumes = append(e.Resumes, resume(words, numbers))
	case ledger.Rewound:
		e.Rewinds = append(e.Rewinds, resume(words, numbers))
	case ledger.Grown:
		e.Grown[words[0]] = true
	case ledger.Discarded:
		e.Discarded[words[0]+"/"+words[1]] = struct{}{}
	case ledger.Expired:
		e.Expired = append(e.Expired, Expired{Group: int16(numbers[0]), Order: numbers[1]})
	case ledger.Asked:
		e.Asked = append(e.Asked, words[0])
	case ledger.Struck:
		e.Struck[words[0]+" "+words[1]]++
	case ledger.Forged:
		e.Forged[numbers[0]] = struct{}{}
	case ledger.Paused:
		e.Paused = append(e.Paused, Pause{Partition: int32(numbers[0]), From: numbers[1], To: numbers[2]})
	case ledger.Frozen:
		e.Frozen[words[0]]++
	case ledger.Garbage:
		e.Garbage[words[0]] = struct{}{}
	case ledger.Copied:
		e.Copied[words[0]]++
	case ledger.Replayed:
		e.Replayed = true
	case ledger.SequenceBack:
		e.SequenceBack = true
	case ledger.Restored:
		e.Restored = true
	case ledger.LostCommits:
		e.LostCommits = true
	}
	return nil
}

func resume(words []string, numbers []int64) Resume {
	return Resume{Group: words[0], Topic: words[1], Partition: int32(numbers[2]), Offset: numbers[3], At: numbers[4]}
}

// ReadDatabase reads the workload's tables, and what the system's own tables still hold.
func (e *Evidence) ReadDatabase(ctx context.Context, conn *pgx.Conn) error {
	e.Orders, e.Effects = map[int64]Order{}, map[int16][]Effect{}
	var id int64
	var o Order
	rows, _ := conn.Query(ctx, `-- judge.orders
SELECT id, message_id::text, key, version, amount, kind, coalesce(request, '') FROM shop.orders`)
	if _, err := pgx.ForEachRow(rows, []any{&id, &o.MessageID, &o.Key, &o.Version, &o.Amount, &o.Kind, &o.Request}, func() error {
		e.Orders[id] = o
		return nil
	}); err != nil {
		return fmt.Errorf("read orders: %w", err)
	}
	var group int16
	var f Effect
	rows, _ = conn.Query(ctx, `-- judge.effects
SELECT grp, order_id, key, version, amount FROM shop.effects ORDER BY sequence`)
	if _, err := pgx.ForEachRow(rows, []any{&group, &f.Order, &f.Key, &f.Version, &f.Amount}, func() error {
		e.Effects[group] = append(e.Effects[group], f)
		return nil
	}); err != nil {
		return fmt.Errorf("read effects: %w", err)
	}
	if err := e.readJournals(ctx, conn); err != nil {
		return err
	}
	rows, _ = conn.Query(ctx, `-- judge.balances
SELECT grp, key, balance, effects FROM shop.balances`)
	var err error
	if e.Balances, err = pgx.CollectRows(rows, pgx.RowToStructByPos[Balance]); err != nil {
		return fmt.Errorf("read balances: %w", err)
	}
	rows, _ = conn.Query(ctx, leftSQL)
	if e.Left, err = pgx.CollectRows(rows, pgx.RowTo[string]); err != nil {
		return fmt.Errorf("read what is left: %w", err)
	}
	return nil
}

// readJournals reads the entries of journals, what fences let through, and where partitions resumed.
func (e *Evidence) readJournals(ctx context.Context, conn *pgx.Conn) error {
	e.Entries, e.Fenced = map[int16][]int64{}, map[int16][]Version{}
	var group int16
	var order int64
	rows, _ := conn.Query(ctx, `-- judge.entries
SELECT grp, order_id FROM shop.entries ORDER BY version`)
	if _, err := pgx.ForEachRow(rows, []any{&group, &order}, func() error {
		e.Entries[group] = append(e.Entries[group], order)
		return nil
	}); err != nil {
		return fmt.Errorf("read entries: %w", err)
	}
	var v Version
	rows, _ = conn.Query(ctx, `-- judge.fenced
SELECT grp, key, version FROM shop.fenced ORDER BY sequence`)
	if _, err := pgx.ForEachRow(rows, []any{&group, &v.Key, &v.Version}, func() error {
		e.Fenced[group] = append(e.Fenced[group], v)
		return nil
	}); err != nil {
		return fmt.Errorf("read what fences let through: %w", err)
	}
	rows, _ = conn.Query(ctx, `-- judge.resumed
SELECT consumer_group || '/' || topic || '/' || partition, ordered, coalesce(next, -1) FROM shop.resumed`)
	var err error
	if e.Resumed, err = pgx.CollectRows(rows, pgx.RowToStructByPos[Resumption]); err != nil {
		return fmt.Errorf("read what resumed elsewhere: %w", err)
	}
	return nil
}

const leftSQL = `-- judge.left
SELECT 'parked: ' || c.name || ' ' || p.topic || '/' || p.partition || '/' || p."offset" || ' ' || p.reason || ' ' || p.state || ': ' || left(coalesce(p.error, ''), 200)
FROM effectonce.parked_messages p JOIN effectonce.consumers c ON c.id = p.consumer
UNION ALL SELECT 'dead: ' || topic || ' ' || reason || ' ' || state || ': ' || left(coalesce(error, ''), 200) FROM effectonce.outbox_dead
UNION ALL SELECT 'session: ' || application_name || ' ' || state || ': ' || left(query, 200) FROM pg_stat_activity
  WHERE datname = current_database() AND application_name ~ '^(producer|relay|consumer|service)-'
UNION ALL SELECT 'an order to resume ' || consumer_group || ' ' || topic || '/' || partition || ' at ' || resume_at FROM effectonce.consumer_positions WHERE resume_at IS NOT NULL
UNION ALL SELECT 'prepared transaction: ' || gid FROM pg_prepared_xacts WHERE database = current_database()`

// ReadTopics reads topics from their start to the end that they have now.
func (e *Evidence) ReadTopics(ctx context.Context, options []kgo.Opt, topics ...string) error {
	client, err := kgo.NewClient(options...)
	if err != nil {
		return err
	}
	defer client.Close()
	extents, err := topicscan.Extents(ctx, client, time.Time{}, topics...)
	if err != nil {
		return err
	}
	return topicscan.Scan(ctx, options, extents, func(r *kgo.Record) error {
		e.Records = append(e.Records, recordOf(r))
		return nil
	})
}

func recordOf(r *kgo.Record) Record {
	record := Record{Topic: r.Topic, Partition: r.Partition, Offset: r.Offset, Key: string(r.Key)}
	for _, h := range r.Headers {
		if h.Key == "message-id" {
			record.ID = string(h.Value)
		}
	}
	if err := json.Unmarshal(r.Value, &record.Body); err != nil {
		record.Unreadable = err.Error()
	} else if want := fmt.Sprintf("key-%d", record.Body.Key); record.Key != want {
		record.Unreadable = fmt.Sprintf("its key is %q, its order's is %q", record.Key, want)
	}
	record.Body.Padding = ""
	return record
}
