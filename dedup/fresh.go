package dedup

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// ErrTaken marks a BeginFresh that met a claim: at least one of the IDs is a duplicate. The transaction is aborted and
// nothing is claimed: roll back, begin again and claim with Queue, which tells the duplicates from the others.
var ErrTaken = errors.New("at least one of the messages was claimed before: roll back and claim with Queue")

// BeginFresh begins a transaction and claims every ID as if none was claimed before, in one round trip: by COPY,
// which takes two thirds of the time of Queue's statement and 40 % less write-ahead log. The unique constraint
// decides as it does there. It waits for a concurrent claim of the same ID, and one duplicate fails the whole claim with
// ErrTaken; each such failure leaves up to len(ids) dead rows and a line in the server's log behind. Use it where
// duplicates are rare.
//
// The steps before come first, beginning with BEGIN, those after follow the claim. They must not insert claims of
// their own, nor return more than one row.
//
// fingerprints are those of QueueChecked; nil: none are stored.
//
// After an error nothing is claimed. A transaction that was begun is aborted and must be rolled back, unless the
// connection is closed. ErrRetry means what it means for the other claims. Under REPEATABLE READ and SERIALIZABLE a
// duplicate is ErrTaken, too, whether the snapshot shows it or not.
func (c *Claims) BeginFresh(
	ctx context.Context, conn *pgx.Conn, before []Step, consumer Consumer, ids []uuid.UUID, fingerprints [][16]byte, after ...Step,
) (*Result, error) {
	result := newResult(ids)
	for _, at := range result.first {
		result.fresh[at] = true
	}
	claim := Step{SQL: c.sql.copy}
	if consumer.forever {
		claim.SQL = c.sql.copyForever
	}
	var prints [][16]byte
	if fingerprints != nil {
		prints = once(result, fingerprints)
		result.conflicts = result.contradictions(ids, fingerprints)
		claim.SQL = c.sql.copyChecked
		if consumer.forever {
			claim.SQL = c.sql.copyCheckedForever
		}
	}
	claim.rows = copyRows(result.sorted, consumer.id, prints)
	done, err := roundTrip(ctx, conn, slices.Concat(before, []Step{claim}, after))
	if err != nil {
		return nil, c.wrapFreshError(err, done == len(before))
	}
	return result, nil
}

// copyRows is PostgreSQL's binary format of COPY: a header, then each row as the number of its fields and each field
// as its length and its bytes, then -1.
func copyRows(ids []uuid.UUID, consumer int32, prints [][16]byte) []byte {
	const header, row, end = "PGCOPY\n\xff\r\n\x00" + "\x00\x00\x00\x00" + "\x00\x00\x00\x00", 2 + 4 + 16 + 4 + 4 + 4 + 16, "\xff\xff"
	rows := make([]byte, 0, len(header)+len(ids)*row+len(end))
	rows = append(rows, header...)
	for i, id := range ids {
		fields := byte(2)
		if prints != nil {
			fields = 3
		}
		rows = append(rows, 0, fields, 0, 0, 0, 16)
		rows = append(rows, id[:]...)
		rows = append(rows, 0, 0, 0, 4)
		rows = binary.BigEndian.AppendUint32(rows, uint32(consumer))
		switch {
		case prints == nil:
		case prints[i] == [16]byte{}:
			rows = append(rows, 0xff, 0xff, 0xff, 0xff) // null
		default:
			rows = append(rows, 0, 0, 0, 16)
			rows = append(rows, prints[i][:]...)
		}
	}
	return append(rows, end...)
}

// contradictions tells which repetitions of an ID in the batch say something else than its first occurrence.
func (r *Result) contradictions(ids []uuid.UUID, fingerprints [][16]byte) []bool {
	differ := make([]bool, len(ids))
	if len(r.first) == len(ids) {
		return differ
	}
	first := make(map[uuid.UUID]int, len(r.first))
	for i, id := range r.sorted {
		first[id] = r.first[i]
	}
	for i, id := range ids {
		one, other := fingerprints[i], fingerprints[first[id]]
		differ[i] = one != other && one != [16]byte{} && other != [16]byte{}
	}
	return differ
}

// wrapFreshError tells a refused claim from every other error. A unique violation is one only if it is the claim's own
// and of a table of claims: a trigger of the database's owner may violate a constraint of its own.
func (c *Claims) wrapFreshError(err error, ofClaim bool) error {
	var pgErr *pgconn.PgError
	if ofClaim && errors.As(err, &pgErr) && pgErr.Code == "23505" && pgErr.SchemaName == c.schema && holdsClaims(pgErr.TableName) {
		return fmt.Errorf("%w: %w", ErrTaken, err)
	}
	return WrapClaimError(err)
}

// holdsClaims reports whether a table holds claims. What is named in an error is the partition.
func holdsClaims(table string) bool {
	return table == "processed_forever" || strings.HasPrefix(table, "processed_messages_")
}
