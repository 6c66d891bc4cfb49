package cli

import (
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

// takeAnyTime makes a connection read times that time.Time or its text forms cannot represent,
// infinity among them, as the first day of year 1 or the last day of year 9999. Rows from before
// schema version 8, and rows of other roles, may hold such times.
func takeAnyTime(conn *pgx.Conn) {
	conn.TypeMap().RegisterType(&pgtype.Type{Name: "timestamptz", OID: pgtype.TimestamptzOID, Codec: anyTime{&pgtype.TimestamptzCodec{}}})
}

type anyTime struct{ *pgtype.TimestamptzCodec }

func (c anyTime) PlanScan(types *pgtype.Map, oid uint32, format int16, target any) pgtype.ScanPlan {
	if _, ok := target.(pgtype.TimestamptzScanner); !ok {
		return nil
	}
	return anyTimeScan{c.TimestamptzCodec.PlanScan(types, oid, format, new(pgtype.Timestamptz))}
}

type anyTimeScan struct{ plan pgtype.ScanPlan }

func (s anyTimeScan) Scan(src []byte, target any) error {
	var read pgtype.Timestamptz
	if err := s.plan.Scan(src, &read); err != nil {
		return err
	}
	first, last := time.Date(1, 1, 1, 0, 0, 0, 0, time.UTC), time.Date(9999, 12, 31, 0, 0, 0, 0, time.UTC)
	switch {
	case !read.Valid:
	case read.InfinityModifier == pgtype.Infinity, read.InfinityModifier == pgtype.Finite && read.Time.After(last):
		read = pgtype.Timestamptz{Time: last, Valid: true}
	case read.InfinityModifier == pgtype.NegativeInfinity, read.Time.Before(first):
		read = pgtype.Timestamptz{Time: first, Valid: true}
	}
	return target.(pgtype.TimestamptzScanner).ScanTimestamptz(read)
}
