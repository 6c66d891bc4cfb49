package torture

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/fleet"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/ledger"
	"github.com/effectonce/effectonce/internal/pause"
)

// restoreMax bounds the time in which a copy takes the place of the database.
const restoreMax = 3 * time.Minute

const endAllSQL = `-- torture.end_all
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = $1`

const preparedSQL = `-- torture.prepared
SELECT gid FROM pg_prepared_xacts WHERE database = current_database()`

// notCopiedSQL is what a logical copy leaves: rows, and sequences that were never called.
const notCopiedSQL = `-- torture.not_copied
SELECT setval('effectonce.outbox_seq_seq', 1, false), setval('effectonce.outbox_ticks_tick_seq', 1, false)`

// restore stops all processes, dumps the database, and lets them continue on the copy. No other fault
// happens meanwhile. Of a logical copy the sequences are missing.
func (n *nemesis) restore(ctx context.Context, logical bool) (err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), restoreMax)
	defer cancel()
	if logical {
		if err := n.untilRepaired(ctx); err != nil {
			return err
		}
	}
	n.servers.Lock()
	defer n.servers.Unlock()
	if err := n.ledger.Write(ledger.Restored); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.startAll()) }()
	if err := n.killAll(ctx); err != nil {
		return err
	}
	conn, err := pgx.Connect(ctx, n.arena.postgres.URL)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	if err := n.finishTransactions(ctx, conn); err != nil {
		return err
	}
	next, last := n.name+"_next", n.name+"_last"
	if _, err := conn.Exec(ctx, "CREATE DATABASE "+next+" TEMPLATE template0"); err != nil {
		return err
	}
	err = n.fillCopy(ctx, next, logical)
	if err == nil {
		err = n.exchange(ctx, conn, next, last)
	}
	for _, name := range []string{next, last} {
		_, failed := conn.Exec(ctx, "DROP DATABASE IF EXISTS "+name+" WITH (FORCE)")
		err = errors.Join(err, failed)
	}
	return err
}

// killAll also waits for what ended by itself and is about to be started again.
func (n *nemesis) killAll(ctx context.Context) error {
	all := n.All(func(*fleet.Process) bool { return true })
	for range 2 {
		for _, p := range all {
			if err := p.Kill(); err != nil {
				return err
			}
		}
		for _, p := range all {
			p.Wait(ctx)
		}
		pause.For(ctx, 2*fleet.RestartPause)
	}
	return nil
}

func (n *nemesis) startAll() (err error) {
	for _, p := range n.All(func(*fleet.Process) bool { return true }) {
		err = errors.Join(err, p.Start())
	}
	return err
}

// finishTransactions ends the sessions that processes left, and commits what they prepared: it would
// not be in the dump.
func (n *nemesis) finishTransactions(ctx context.Context, conn *pgx.Conn) error {
	for more := 1; more > 0; {
		if err := conn.QueryRow(ctx, endAllSQL, n.name).Scan(&more); err != nil {
			return err
		}
		pause.For(ctx, 100*time.Millisecond)
	}
	for {
		rows, _ := n.pool.Query(ctx, preparedSQL)
		names, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err == nil {
			for _, name := range names {
				err = errors.Join(err, n.untilDone(ctx, "COMMIT PREPARED '"+name+"'"))
			}
			return err
		}
		if !pause.For(ctx, 100*time.Millisecond) { // this pool's sessions ended, too
			return err
		}
	}
}

func (n *nemesis) fillCopy(ctx context.Context, name string, logical bool) error {
	if err := n.arena.postgres.DumpInto(ctx, n.name, name); err != nil {
		return err
	}
	address, err := n.arena.url(name)
	if err != nil {
		return err
	}
	conn, err := pgx.Connect(ctx, address)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	if n.plan.Scene.Lazy {
		if err := makeLazy(ctx, conn, name); err != nil {
			return err
		}
	}
	if logical {
		_, err = conn.Exec(ctx, notCopiedSQL)
	}
	return err
}

// exchange lets the copy take the database's name. The run itself asks the database all the time.
func (n *nemesis) exchange(ctx context.Context, conn *pgx.Conn, next, last string) error {
	for _, sql := range []string{"ALTER DATABASE " + n.name + " RENAME TO " + last, "ALTER DATABASE " + next + " RENAME TO " + n.name} {
		for {
			_, err := conn.Exec(ctx, endAllSQL, n.name)
			if err == nil {
				_, err = conn.Exec(ctx, sql)
			}
			if err == nil {
				break
			}
			if !pause.For(ctx, 50*time.Millisecond) {
				return err
			}
		}
	}
	return nil
}
