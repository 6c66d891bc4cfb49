package trace

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/held"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/keys"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/pipeline"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/topicscan"
	"github.com/effectonce/effectonce/dedup"
)

// rowsMax bounds how many rows of a kind are found.
const rowsMax = 1000

// query reads rows of a section, which an error names.
func query[T any](ctx context.Context, e *explainer, section, sql string, scan pgx.RowToFunc[T], args ...any) ([]T, error) {
	return operator.Rows(ctx, e.db, "read "+section, e.Schema, sql, scan, args...)
}

func (e *explainer) rows(ctx context.Context, ids []uuid.UUID, above int64) ([]Row, error) {
	return query(ctx, e, "the outbox", rowsSQL, pgx.RowToStructByPos[Row], ids, above)
}

// states reads what each relay did with the rows.
func (e *explainer) states(ctx context.Context, rows []Row) error {
	if len(rows) == 0 {
		return nil
	}
	var seqs []int64
	for i := range rows {
		seqs, rows[i].States = append(seqs, rows[i].Seq), map[string]string{}
	}
	cuts, err := pipeline.Cuts(ctx, e.db, e.Schema)
	if err != nil {
		return err
	}
	for name, cut := range cuts {
		published, err := operator.Rows(ctx, e.db, fmt.Sprintf("read what relay %q has published", name), e.Schema, publishedSQL, pgx.RowTo[int64], cut.Args(seqs)...)
		if err != nil {
			return err
		}
		for _, row := range rows {
			row.States[name] = StateWaiting
			if slices.Contains(published, row.Seq) {
				row.States[name] = StatePublished
			}
		}
	}
	for _, dead := range e.out.Dead {
		for _, row := range rows {
			if row.Seq == dead.Seq {
				row.States[dead.Relay] = StateDead
			}
		}
	}
	return nil
}

// readRules reads the consumers' topics, and their rules for IDs. Without consumers, each header that any
// standard rule reads counts.
func (e *explainer) readRules(ctx context.Context) error {
	var topic, text, alias string
	texts := map[string]bool{}
	err := operator.Each(ctx, e.db, "read the consumers' topics", e.Schema, topicsSQL, nil, []any{&topic, &text, &alias}, func() error {
		e.scopes, texts[text] = append(e.scopes, topic), true
		e.aliases[topic] = append(e.aliases[topic], alias)
		return nil
	})
	if len(texts) == 0 {
		texts["standard+debezium+watermill"] = true
	}
	for _, text := range slices.Sorted(maps.Keys(texts)) {
		rule, wrong := dedup.ParseIDRule(text)
		if wrong != nil { // of a later release
			e.out.Problems = append(e.out.Problems, wrong.Error())
		}
		e.rules = append(e.rules, rule)
	}
	e.scopes = slices.Compact(e.scopes)
	return err
}

func (e *explainer) readClaims(ctx context.Context) (err error) {
	e.out.Claims, err = query(ctx, e, "claims", claimsSQL, pgx.RowToStructByPos[Claim], e.names.sorted())
	return err
}

// places are those of the records that were found, and the one that was asked for.
func (e *explainer) places(asked bool) (all []topicscan.Place) {
	for _, record := range e.out.Records {
		all = append(all, record.Place)
	}
	if asked && e.place != nil {
		all = append(all, *e.place)
	}
	return all
}

func (e *explainer) readParked(ctx context.Context) error {
	places := e.places(true)
	topics, partitions, offsets := make([]string, len(places)), make([]int32, len(places)), make([]int64, len(places))
	for i, place := range places {
		topics[i], partitions[i], offsets[i] = place.Topic, place.Partition, place.Offset
	}
	seqs, err := query(ctx, e, "parked messages", parkedSQL, pgx.RowTo[int64], e.names.sorted(), topics, partitions, offsets)
	if err != nil || len(seqs) == 0 {
		return err
	}
	e.out.Parked, err = held.Parked.List(ctx, e.db, e.Schema, held.Filter{Seqs: seqs, Behind: true}, len(seqs))
	for _, m := range e.out.Parked {
		e.names.ids[m.ID] = true // if only its place was known
	}
	return err
}

// childStepsMax is the assumed maximum of messages that one handler publishes for one message.
const childStepsMax = 100

// readChildren derives the IDs that consumers give to what their handlers publish, from the times
// at which the message may have been handled: that of its record, or of its release. A child that
// exists is in this outbox: claim and child are one transaction.
func (e *explainer) readChildren(ctx context.Context) (err error) {
	if len(e.out.Claims) == 0 {
		return nil
	}
	var ids []uuid.UUID
	for _, claim := range e.out.Claims {
		for _, record := range e.out.Records {
			for step := range childStepsMax {
				ids = append(ids, dedup.PublishID(claim.Consumer, claim.ID, "publish:"+strconv.Itoa(step), record.Time))
			}
			ids = append(ids, dedup.PublishID(claim.Consumer, claim.ID, "dead-letter", record.Time))
		}
	}
	if len(ids) == 0 {
		return nil
	}
	var above int64
	if len(e.out.Outbox) > 0 {
		above = e.out.Outbox[0].Seq // a child has a higher seq
	}
	if e.out.Children, err = e.rows(ctx, ids, above); err != nil {
		return err
	}
	return e.states(ctx, e.out.Children)
}

// readActions reads what operators did to the message.
func (e *explainer) readActions(ctx context.Context) (err error) {
	var ids, seqs []string
	for _, id := range e.names.sorted() {
		ids = append(ids, id.String())
	}
	for _, row := range e.out.Outbox {
		ids, seqs = append(ids, row.ID.String()), append(seqs, strconv.FormatInt(row.Seq, 10))
	}
	e.out.Actions, err = operator.ReadActions(ctx, e.db, e.Schema, actionsSQL, ids, seqs)
	return err
}

// readPassed finds consumers that are past a record, or past the place that was asked for, and have
// nothing stored about it.
func (e *explainer) readPassed(ctx context.Context) error {
	places := e.places(e.out.At == nil || e.out.At.State == stateDeleted)
	slices.SortFunc(places, func(a, b topicscan.Place) int { return strings.Compare(a.String(), b.String()) })
	for _, place := range places {
		found, err := query(ctx, e, "positions", pastSQL, func(row pgx.CollectableRow) (Passed, error) {
			p := Passed{Place: place}
			err := row.Scan(&p.Consumer, &p.Group, &p.Position, &p.WindowSeconds)
			return p, err
		}, place.Topic, place.Partition, place.Offset)
		if err != nil {
			return err
		}
		for _, p := range found {
			claimed := slices.ContainsFunc(e.out.Claims, func(c Claim) bool { return c.Consumer == p.Consumer })
			waits := slices.ContainsFunc(e.out.Parked, func(m held.Row) bool { return m.Consumer == p.Consumer })
			if !claimed && !waits {
				e.out.Passed = append(e.out.Passed, p)
			}
		}
	}
	return nil
}

const keyBytesMax = 255

// readRequests finds the requests whose idempotency key was asked for. It continues with the IDs
// that their phases give to what they publish, which topics may still have when the outbox does
// not.
func (e *explainer) readRequests(ctx context.Context) (err error) {
	if len(e.Text) > keyBytesMax {
		return nil
	}
	e.out.Requests, err = keys.Find(ctx, e.db, e.Schema, keys.Name{Key: e.Text})
	for _, r := range e.out.Requests {
		steps := slices.Clone(r.Phases)
		if r.Calling != nil {
			steps = append(steps, *r.Calling)
		}
		for _, step := range steps {
			e.names.addText(r.ChildID(step).String())
		}
	}
	return err
}

// readRequestActions adds what operators did to requests.
func (e *explainer) readRequestActions(ctx context.Context) error {
	for _, r := range e.out.Requests {
		actions, err := keys.Actions(ctx, e.db, e.Schema, r.Place, keyActionsMax)
		if err != nil {
			return err
		}
		e.out.Actions = append(e.out.Actions, actions...)
	}
	return nil
}

const keyActionsMax = 100
