package dedup

import (
	"crypto/sha256"
	"encoding/binary"
	"strings"
	"time"

	"github.com/google/uuid"
)

// crockford is the alphabet of ULIDs (https://github.com/ulid/spec).
const crockford = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"

// MessageID returns the ID under which a message is claimed, from the bytes that it carries. A
// UUIDv7 in its usual form of 36 characters and a ULID are used as they are, because they carry
// their time. Anything else (a UUIDv4, "order-4711", a megabyte, bytes that are not UTF-8) becomes
// a UUIDv8 made of the first 122 bits of SHA-256 over the scope's length, the scope and the bytes.
// Its top bit is set, so it never falls into the range of IDs with a time. The scope is the
// CloudEvents source if there is one, otherwise the topic. The SQL function
// effectonce.message_id(scope, text) computes the same.
func MessageID(scope string, raw []byte) uuid.UUID {
	if id, ok := parseUUIDv7(raw); ok {
		return id
	}
	if id, ok := parseULID(raw); ok {
		return id
	}
	hash := sha256.New()
	var length [4]byte
	binary.BigEndian.PutUint32(length[:], uint32(len(scope)))
	hash.Write(length[:])
	hash.Write([]byte(scope))
	hash.Write(raw)
	return hashedID(hash.Sum(nil))
}

// hashedID returns an ID that carries no time: a UUIDv8 with the top bit set.
func hashedID(sum []byte) uuid.UUID {
	var id uuid.UUID
	copy(id[:], sum)
	id[0] |= 0x80
	id[6] = id[6]&0x0f | 0x80
	id[8] = id[8]&0x3f | 0x80
	return id
}

// PublishID derives the ID of a message that a handler publishes, from the name of the consumer, the
// ID of the message that it handles, and the name of the step. The same three give the same ID, at every
// re-execution and on every machine; two consumers of one message publish two messages. The ID has the
// form of a UUIDv7 with the time at, in milliseconds, so the next consumer can prove that it is fresh.
// at must be a time that re-executions see again (the record's timestamp), never the current time.
// Times before 1970 and after the year 6429 are replaced by these bounds. The rest is SHA-256 over "publish"
// and the three parts, each preceded by its length, as for CallKey.
func PublishID(scope string, parent uuid.UUID, step string, at time.Time) uuid.UUID {
	id := uuid.UUID(sum("publish", scope, string(parent[:]), step)[:16])
	var milli [8]byte
	binary.BigEndian.PutUint64(milli[:], uint64(min(max(at.UnixMilli(), 0), 1<<47-1)))
	copy(id[:6], milli[2:])
	id[6] = id[6]&0x0f | 0x70
	id[8] = id[8]&0x3f | 0x80
	return id
}

// LaterID is PublishID for a message that is published later. It carries no time: the parent's would
// be too old for the next consumer.
func LaterID(scope string, parent uuid.UUID, step string) uuid.UUID {
	return hashedID(sum("later", scope, string(parent[:]), step))
}

// CallKey derives the key that a foreign call of a message carries (an Idempotency-Key), from the
// name of the consumer, the ID of the message and the name of the step. It depends on nothing else,
// in particular not on any time. However often and however late the message is re-executed, on
// whatever machine, the key is the same. Another consumer, message or step gives another key. It is
// made of the first 122 bits of SHA-256 over the three parts, each preceded by its length in 4
// bytes (big-endian), in the form of a UUIDv8 (RFC 9562, section 5.8) with the top bit set: it
// never looks like an ID that carries a time. Other programs may compute it.
func CallKey(scope string, parent uuid.UUID, step string) uuid.UUID {
	return hashedID(sum(scope, string(parent[:]), step))
}

// sum is SHA-256 over parts, each preceded by its length.
func sum(parts ...string) []byte {
	hash := sha256.New()
	for _, part := range parts {
		hash.Write(binary.BigEndian.AppendUint32(nil, uint32(len(part))))
		hash.Write([]byte(part))
	}
	return hash.Sum(nil)
}

// Time returns the time that an ID carries, with a resolution of a millisecond, and false for an ID
// that is a hash.
func Time(id uuid.UUID) (time.Time, bool) {
	if id[0]&0x80 != 0 {
		return time.Time{}, false
	}
	var milli [8]byte
	copy(milli[2:], id[:6])
	return time.UnixMilli(int64(binary.BigEndian.Uint64(milli[:]))), true
}

func parseUUIDv7(raw []byte) (uuid.UUID, bool) {
	if len(raw) != 36 {
		return uuid.UUID{}, false
	}
	// ParseBytes accepts 36 bytes only in the canonical form.
	id, err := uuid.ParseBytes(raw)
	if err != nil || id[6]>>4 != 7 || id[8]>>6 != 2 || id[0]&0x80 != 0 {
		return uuid.UUID{}, false
	}
	return id, true
}

// parseULID reads 26 letters of five bits each, most significant first. The first letter may be 0
// to 3: a larger one would set the top bit, which marks IDs without time, or overflow.
func parseULID(raw []byte) (uuid.UUID, bool) {
	if len(raw) != 26 || raw[0] < '0' || raw[0] > '3' {
		return uuid.UUID{}, false
	}
	var high, low uint64
	for _, c := range raw {
		if 'a' <= c && c <= 'z' {
			c -= 'a' - 'A'
		}
		digit := strings.IndexByte(crockford, c)
		if digit < 0 {
			return uuid.UUID{}, false
		}
		high = high<<5 | low>>59
		low = low<<5 | uint64(digit)
	}
	var id uuid.UUID
	binary.BigEndian.PutUint64(id[:8], high)
	binary.BigEndian.PutUint64(id[8:], low)
	return id, true
}
