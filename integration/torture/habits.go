package torture

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/outbox"
)

// event is a message's payload.
type event struct {
	ID      int64
	Key     string
	Version int64  // of the key
	Habit   string // what its handler does
	Source  string // the group that published it; empty: the shop
	Garbage bool   // published in a part that was rolled back, or under another's ID: it must not be handled
	Padding string
}

const effectSQL = `INSERT INTO public.torture_effects (consumer, source, id, key, version) VALUES ($1, $2, $3, $4, $5)`

// attempt is one call of a handler for one message.
type attempt struct {
	*group
	event

	number  int // from 1, over all replicas
	message *consumer.Message
	pool    *pgxpool.Pool
	tx      pgx.Tx          // nil: statements are queued
	queue   *consumer.Queue // nil: they are executed
	batch   bool            // the transaction is that of several messages
}

// run executes statements; a queued one fails later, if it does.
func (a *attempt) run(ctx context.Context, sql string, args ...any) error {
	if a.queue != nil {
		a.queue.Queue(sql, args...)
		return nil
	}
	_, err := a.tx.Exec(ctx, sql, args...)
	return err
}

// effect is what the message is for: a row, and for most groups a message.
func (a *attempt) effect(ctx context.Context) error {
	if err := a.run(ctx, effectSQL, a.name, a.Source, a.ID, a.Key, a.Version); err != nil {
		return err
	}
	return a.publish(ctx, false)
}

// undone is an effect in a part that must be rolled back.
func (a *attempt) undone(ctx context.Context) error {
	if err := a.run(ctx, effectSQL, a.name, a.Source, -a.ID, a.Key, a.Version); err != nil {
		return err
	}
	return a.publish(ctx, true)
}

func (a *attempt) publish(ctx context.Context, garbage bool) error {
	if a.child == "" {
		return nil
	}
	m, err := a.childMessage(garbage)
	if err != nil {
		return err
	}
	if a.queue != nil {
		return a.queue.Publish(ctx, m)
	}
	return a.group.publish(ctx, a.tx, m)
}

func (a *attempt) childMessage(garbage bool) (m outbox.Message, err error) {
	m = outbox.Message{Topic: a.child, Key: []byte(a.Key)}
	if a.batch {
		m.ID = a.message.PublishID(fmt.Sprint("child", garbage))
	}
	m.Payload, err = json.Marshal(event{ID: a.ID, Key: a.Key, Version: a.Version, Habit: a.childHabit(a.ID), Source: a.name, Garbage: garbage})
	return m, err
}

// together is the effects of messages whose handlers do nothing else, in one statement.
func (g *group) together(ctx context.Context, tx pgx.Tx, attempts []*attempt) error {
	if len(attempts) == 0 { // the role may be another one
		return nil
	}
	var sources, keys []string
	var ids, versions []int64
	var children []outbox.Message
	for _, a := range attempts {
		sources, ids, keys, versions = append(sources, a.Source), append(ids, a.ID), append(keys, a.Key), append(versions, a.Version)
		child, err := a.childMessage(false)
		if err != nil {
			return err
		}
		children = append(children, child)
	}
	_, err := tx.Exec(ctx, `INSERT INTO public.torture_effects (consumer, source, id, key, version)
		SELECT $1, source, id, key, version FROM unnest($2::text[], $3::bigint[], $4::text[], $5::bigint[]) WITH ORDINALITY AS e (source, id, key, version, n) ORDER BY n`,
		g.name, sources, ids, keys, versions)
	if err != nil || g.child == "" {
		return err
	}
	return outbox.Publish(ctx, tx, children...)
}

var errTorture = errors.New("torture: an error")

// habit is one thing that people write in handlers.
type habit struct {
	tx     bool // needs the transaction: not for queued statements
	leaves bool // state in the session, with which the textbook comes to a halt
	do     func(ctx context.Context, a *attempt) error
}

// fails makes the first attempts fail behind the effect.
func fails(attempts int, how func(ctx context.Context, a *attempt) error) habit {
	return habit{do: func(ctx context.Context, a *attempt) error {
		if a.number > attempts {
			return a.effect(ctx)
		}
		if err := a.effect(ctx); err != nil {
			return err
		}
		return how(ctx, a)
	}}
}

// sql executes a statement.
func sql(text string) func(context.Context, *attempt) error {
	return func(ctx context.Context, a *attempt) error { return a.run(ctx, text) }
}

func before(what func(context.Context, *attempt) error) habit {
	return habit{do: func(ctx context.Context, a *attempt) error {
		if err := what(ctx, a); err != nil {
			return err
		}
		return a.effect(ctx)
	}}
}

func after(what func(context.Context, *attempt) error) habit {
	return habit{do: func(ctx context.Context, a *attempt) error {
		if err := a.effect(ctx); err != nil {
			return err
		}
		return what(ctx, a)
	}}
}

func needsTx(h habit) habit {
	h.tx = true
	return h
}

func leaves(h habit) habit {
	h.leaves = true
	return needsTx(h)
}

func raise(sqlstate string) func(context.Context, *attempt) error {
	return sql(`DO $$BEGIN RAISE EXCEPTION 'torture' USING ERRCODE = '` + sqlstate + `'; END$$`)
}

// deafFor waits, whatever the context says.
func deafFor(d time.Duration) func(context.Context, *attempt) error {
	return func(context.Context, *attempt) error {
		<-time.After(d)
		return nil
	}
}

// habits are what handlers do, by name.
func habits() map[string]habit {
	return map[string]habit{
		"slow":        before(deafFor(30 * time.Millisecond)),
		"error":       fails(3, func(context.Context, *attempt) error { return errTorture }),
		"panic":       fails(1, func(context.Context, *attempt) error { panic(errTorture) }),
		"retry_after": fails(2, func(context.Context, *attempt) error { return consumer.RetryAfter(300*time.Millisecond, errTorture) }),
		"permanent": {do: func(ctx context.Context, a *attempt) error {
			if a.repaired.Load() || (a.Rival != nil || a.config.OnFailure == consumer.OnFailureBlock) && a.number > 3 { // else it blocks for the whole run
				return a.effect(ctx)
			}
			return errors.Join(a.effect(ctx), consumer.Permanent(errTorture))
		}},

		"serialization":  fails(3, raise("40001")),
		"read_only":      fails(1, sql(`SET TRANSACTION READ ONLY`)),
		"terminated":     fails(1, sql(`SELECT pg_terminate_backend(pg_backend_pid())`)),
		"ends_in_commit": fails(2, sql(`INSERT INTO public.torture_terminators DEFAULT VALUES`)),
		"deferred":       fails(2, sql(`INSERT INTO public.torture_uniques VALUES (1), (1)`)),
		"sleeps":         fails(1, sql(`SELECT pg_sleep(3)`)),
		"hot_row": before(func(ctx context.Context, a *attempt) error {
			return a.run(ctx, `UPDATE public.torture_hot SET n = n + 1 WHERE k = $1`, a.ID%3)
		}),
		"locks":           before(sql(`SELECT pg_advisory_xact_lock(7)`)),
		"session_lock":    leaves(before(sql(`SELECT pg_advisory_lock(8)`))),
		"hangs":           fails(1, func(ctx context.Context, _ *attempt) error { <-ctx.Done(); return ctx.Err() }),
		"deaf":            fails(1, deafFor(2500*time.Millisecond)),
		"idle":            fails(1, deafFor(1200*time.Millisecond)),
		"commits":         needsTx(fails(1, swallowed(sql(`COMMIT`)))),
		"rolls_back":      needsTx(fails(1, swallowed(sql(`ROLLBACK`)))),
		"swallows":        needsTx(fails(2, swallowed(sql(`SELECT 1/0`)))),
		"open_rows":       needsTx(fails(1, openRows)),
		"bad_copy":        needsTx(fails(1, badCopy)),
		"second_session":  needsTx(before(secondSession)),
		"search_path":     after(sql(`SELECT set_config('search_path', 'nowhere', true)`)),
		"timeout":         needsTx(after(sql(`SET LOCAL statement_timeout = '1ms'`))),
		"role":            needsTx(after(sql(`SET LOCAL ROLE torture_tenant`))),
		"session_role":    leaves(after(sql(`SET ROLE torture_tenant`))),
		"session_setting": leaves(before(sql(`LISTEN torture; SET SESSION application_name = 'torture: left behind'`))),
		"several":         leaves(before(sql(`SELECT 1; SET search_path = nowhere, public; SELECT 2`))),
		"temporary_table": needsTx(before(sql(`CREATE TEMP TABLE torture_effects (x int) ON COMMIT DROP`))),
		"savepoint":       needsTx(before(savepoint)),
		"savepoints":      needsTx(before(savepoints)),
		"nested":          needsTx(before(nested)),
	}
}

func swallowed(what func(context.Context, *attempt) error) func(context.Context, *attempt) error {
	return func(ctx context.Context, a *attempt) error {
		_ = what(ctx, a)
		return nil
	}
}

func openRows(ctx context.Context, a *attempt) error {
	_, err := a.tx.Query(ctx, `SELECT generate_series(1, 100)`) //nolint:sqlclosecheck // they stay open
	return err
}

func badCopy(ctx context.Context, a *attempt) error {
	_, err := a.tx.CopyFrom(ctx, pgx.Identifier{"public", "torture_uniques"}, []string{"n"}, pgx.CopyFromRows([][]any{{"no number"}}))
	return err
}

func secondSession(ctx context.Context, a *attempt) error {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	_, err := a.pool.Exec(ctx, `SELECT 1`)
	return err
}

func savepoint(ctx context.Context, a *attempt) error {
	if err := a.run(ctx, `SAVEPOINT a`); err != nil {
		return err
	}
	if err := a.undone(ctx); err != nil {
		return err
	}
	return a.run(ctx, `ROLLBACK TO a`)
}

func savepoints(ctx context.Context, a *attempt) error {
	if err := a.run(ctx, `SAVEPOINT "A b"`); err != nil {
		return err
	}
	if err := a.undone(ctx); err != nil {
		return err
	}
	if err := a.run(ctx, `savepoint x`); err != nil {
		return err
	}
	if err := a.run(ctx, `SELECT 1/0`); err == nil {
		return errors.New("torture: 1/0 is no error")
	}
	return a.run(ctx, `/* back */ rollback work to "A b" ;`)
}

func nested(ctx context.Context, a *attempt) error {
	inner, err := a.tx.Begin(ctx)
	if err != nil {
		return err
	}
	outer := a.tx
	a.tx = inner
	err = a.undone(ctx)
	a.tx = outer
	return errors.Join(err, inner.Rollback(ctx))
}

// handle does what the event asks for.
func (a *attempt) handle(ctx context.Context) error {
	if a.Garbage {
		a.broken("a message was handled that was rolled back, or has another's ID: %+v", a.event)
	}
	if h, ok := a.habits[a.Habit]; ok && (a.tx != nil || !h.tx) {
		return h.do(ctx, a)
	}
	return a.effect(ctx)
}

// handler has the group's shape.
func (g *group) handler(pool *pgxpool.Pool) consumer.Handler {
	read := func(m *consumer.Message) (*attempt, error) {
		a := &attempt{group: g, message: m, pool: pool}
		if err := json.Unmarshal(m.Value, &a.event); err != nil {
			return nil, consumer.Permanent(err)
		}
		a.number = g.count(a.Source, a.ID)
		return a, nil
	}
	switch g.Shape {
	case shapeQueued:
		return consumer.Queued(func(ctx context.Context, q *consumer.Queue, m *consumer.Message) error {
			a, err := read(m)
			if err != nil {
				return err
			}
			a.queue = q
			return a.handle(ctx)
		})
	case shapeBatch:
		return consumer.Batch(func(ctx context.Context, tx pgx.Tx, messages []*consumer.Message) error {
			var plain []*attempt
			for _, m := range messages {
				a, err := read(m)
				if err == nil {
					a.tx, a.batch = tx, true
					if a.Habit == "" && !a.Garbage {
						plain = append(plain, a)
						continue
					}
					if err := g.together(ctx, tx, plain); err != nil { // in the order of their keys
						return err
					}
					plain, err = nil, a.handle(ctx)
				}
				if err != nil && m.Offset%2 == 0 {
					return consumer.Blame(m, err)
				}
				if err != nil {
					return err
				}
			}
			return g.together(ctx, tx, plain)
		})
	default:
		return consumer.Each(func(ctx context.Context, tx pgx.Tx, m *consumer.Message) error {
			a, err := read(m)
			if err != nil {
				return err
			}
			a.tx = tx
			return a.handle(ctx)
		})
	}
}
