package dedup

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// ErrTaken marks a BeginFresh that met a claim: at least one of the IDs is a duplicate. The transaction is aborted and
// nothing is claimed: roll back, begin again and claim with Queue, which tells the duplicates from the others.
var ErrTaken = errors.New("at least one of the messages was claimed before: roll back and claim with Queue")

// BeginFresh begins a transaction and claims every ID as if none was claimed before, in one round trip: by COPY,
// which takes PostgreSQL half the time of Queue's statement and a third less write-ahead log. The unique constraint
// decides as it does there. It waits for a concurrent claim of the same ID, and a duplicate fails the whole claim with
// ErrTaken; each such failure leaves up to len(ids) dead rows and one line in the server's log behind. Take it where
// duplicates are rare.
//
// begin are statements that come before the claim, BEGIN first, and then ones that come after it, separated by
// semicolons; then may be empty. They are sent as they are, without parameters, and what they return is not read, so
// those that check something have to raise an error. They must not insert claims of their own.
//
// fingerprints are those of QueueChecked; nil: none are stored.
//
// After an error the transaction is aborted, or was never begun, and must be rolled back. ErrRetry means what it means
// for the other claims. Under REPEATABLE READ and SERIALIZABLE a duplicate is ErrTaken, too, whether the snapshot
// shows it or not.
func (c *Claims) BeginFresh(
	ctx context.Context, conn *pgx.Conn, begin, then string, consumer Consumer, ids []uuid.UUID, fingerprints [][16]byte,
) (*Result, error) {
	result := newResult(ids)
	for _, at := range result.first {
		result.fresh[at] = true
	}
	sql := c.sql.copy
	if consumer.forever {
		sql = c.sql.copyForever
	}
	var prints [][16]byte
	if fingerprints != nil {
		prints = once(result, fingerprints)
		result.conflicts = result.contradictions(ids, fingerprints)
		sql = c.sql.copyChecked
		if consumer.forever {
			sql = c.sql.copyCheckedForever
		}
	}
	// COPY of pgx.Conn would ask for the types of the columns in a round trip of its own. This one sends the rows
	// without waiting for the server's leave; where a statement before them fails, the server ignores them.
	rows := bytes.NewReader(copyRows(result.sorted, consumer.id, prints))
	_, err := conn.PgConn().CopyFrom(ctx, rows, begin+";\n"+sql+";\n"+then)
	if err != nil {
		return nil, c.wrapFreshError(err)
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
		rows = binary.BigEndian.AppendUint32(rows, uint32(consumer)) //nolint:gosec // the same bits
		if prints != nil {
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
		differ[i] = fingerprints[i] != fingerprints[first[id]]
	}
	return differ
}

// wrapFreshError tells a refused claim from every other error. A unique violation is one only if it is of a table of
// claims: a trigger of the database's owner may violate a constraint of its own.
func (c *Claims) wrapFreshError(err error) error {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) && pgErr.Code == "23505" && pgErr.SchemaName == c.schema && ofClaims(pgErr.TableName) {
		return fmt.Errorf("%w: %w", ErrTaken, err)
	}
	return WrapClaimError(err)
}

// ofClaims tells whether a table holds claims. What is named in an error is the partition.
func ofClaims(table string) bool {
	return table == "processed_forever" || strings.HasPrefix(table, "processed_messages_")
}
