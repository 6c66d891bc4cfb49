package consumer

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// The single statements of the simulated database.

// simulatedRow is a row, or an error.
type simulatedRow struct {
	values []any
	err    error
}

func (r simulatedRow) Scan(dest ...any) error {
	if r.err != nil {
		return r.err
	}
	for i, to := range dest {
		switch to := to.(type) {
		case *int:
			*to = r.values[i].(int)
		case *int16:
			*to = r.values[i].(int16)
		case *int64:
			*to = r.values[i].(int64)
		case **int64:
			*to = r.values[i].(*int64)
		case **bool:
			*to = r.values[i].(*bool)
		case **string:
			*to = r.values[i].(*string)
		case *bool:
			*to = r.values[i].(bool)
		case *[]byte:
			*to = r.values[i].([]byte)
		default:
			return fmt.Errorf("the simulation cannot scan %T", to)
		}
	}
	return nil
}

// simulatedRows are rows for pgx.ForEachRow.
type simulatedRows struct {
	pgx.Rows // what is not used
	rows     []simulatedRow
	at       int
}

func (r *simulatedRows) Next() bool                    { r.at++; return r.at <= len(r.rows) }
func (r *simulatedRows) Scan(dest ...any) error        { return r.rows[r.at-1].Scan(dest...) }
func (r *simulatedRows) Err() error                    { return nil }
func (r *simulatedRows) Close()                        {}
func (r *simulatedRows) CommandTag() pgconn.CommandTag { return pgconn.CommandTag{} }

// tag is the name of a statement.
func tag(sql string) string {
	name, _, _ := strings.Cut(strings.TrimPrefix(sql, "-- consumer."), "\n")
	return name
}

// trip is the round trip of a statement.
func (d *simulatedDatabase) trip(ctx context.Context, name string, at int) error {
	d.mu.Lock()
	n := d.number(name, at)
	d.mu.Unlock()
	r := d.m.draw(name, at, n)
	if !simulatedSleep(ctx, simulatedWait(r, 3*time.Millisecond)) {
		return context.Cause(ctx)
	}
	return d.refuse(r)
}

func (d *simulatedDatabase) Exec(ctx context.Context, sql string, _ ...any) (pgconn.CommandTag, error) {
	return pgconn.CommandTag{}, d.trip(ctx, tag(sql), 0) // adopt and trouble change nothing here
}

func (d *simulatedDatabase) SendBatch(context.Context, *pgx.Batch) pgx.BatchResults {
	panic("no parked message is retried in the simulation")
}

func (d *simulatedDatabase) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	name := tag(sql)
	if err := d.trip(ctx, name, 0); err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	rows := &simulatedRows{}
	switch name {
	case "poll": // pollSQL
		epoch, known, now := args[4].([]int64)[0], args[5].([]*int64)[0], d.row.epoch
		other, back := now != epoch, now < epoch && d.m.mistake != "a lost takeover is not noticed" || now == epoch && known != nil && (d.row.next == nil || *d.row.next < *known)
		if other || back {
			rows.rows = append(rows.rows, simulatedRow{values: []any{0, &now, &other, &back, false, false, false}})
		}
	case "heads":
		for key := range d.parkedKeys() {
			rows.rows = append(rows.rows, simulatedRow{values: []any{key[:]}})
		}
	}
	return rows, nil
}

func (d *simulatedDatabase) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	name := tag(sql)
	at := 0
	if name == "attempt" {
		at = d.offsetOf(args[1].([16]byte))
	}
	if err := d.trip(ctx, name, at); err != nil {
		return simulatedRow{err: err}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	switch name {
	case "attempt":
		d.attempts[at]++
		return simulatedRow{values: []any{d.attempts[at], int16(0)}}
	case "primary":
		return simulatedRow{values: []any{true}}
	case "holder":
		owner := "the other member"
		return simulatedRow{values: []any{d.row.epoch, &owner}}
	case "advance_apart":
		p := &position{epoch: args[3].(int64), stored: args[4].(*int64), server: args[7].(time.Time)}
		if !p.server.Equal(d.server) && d.m.mistake != "the server is not checked" {
			return simulatedRow{err: pgx.ErrNoRows}
		}
		if f := d.checked(p); f != nil {
			return simulatedRow{err: f.err}
		}
		to := args[5].(int64)
		if d.m.mistake == "the position is stored ahead" {
			to = min(to+1, int64(d.m.records))
		}
		stored := d.advance(to)
		d.m.note("epoch %d stores position %d", p.epoch, *stored)
		d.save()
		return simulatedRow{values: []any{stored}}
	}
	panic("the simulation has no statement " + name)
}

// offsetOf finds a message by its ID.
func (d *simulatedDatabase) offsetOf(id [16]byte) int {
	for at := range d.m.records {
		if coordinatesID(&Message{Topic: simulatedTopic, Offset: int64(at), topicID: positionTopic}) == id {
			return at
		}
	}
	panic("a message with an unknown ID")
}
