package region

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

// SlotsMax is the number of slots. It is fixed forever.
const SlotsMax = 1024

// Table assigns slots to regions.
type Table struct {
	// Version identifies the table: larger than that of the previous table, at least 1.
	Version int
	// From is when the table starts to apply, by the times in keys: later than that of the previous
	// table. The first table applies to keys without a time, too. A key from before the first From
	// may have had its home in a dropped table: Middleware refuses it. Zero, for the very first
	// table: there are no such keys.
	From time.Time
	// Slots has the region of each slot: SlotsMax names, each of 1 to 63 bytes of visible ASCII.
	Slots []string
}

// Homes finds the home of a key. It is safe for concurrent use.
type Homes struct{ tables []Table }

// New takes the tables that keys may still belong to, oldest first. It returns all problems at
// once.
func New(tables ...Table) (*Homes, error) {
	var problems []error
	if len(tables) == 0 {
		problems = append(problems, errors.New("no table: want at least one"))
	}
	for i, t := range tables {
		if t.Version < 1 || i > 0 && t.Version <= tables[i-1].Version {
			problems = append(problems, fmt.Errorf("table %d has version %d: want one from 1 that is larger than that of the table before", i, t.Version))
		}
		if i > 0 && !t.From.After(tables[i-1].From) {
			problems = append(problems, fmt.Errorf("table %d holds from %v: want a time after that of the table before", i, t.From))
		}
		if len(t.Slots) != SlotsMax {
			problems = append(problems, fmt.Errorf("table %d has %d slots: want %d", i, len(t.Slots), SlotsMax))
		}
		if at := slices.IndexFunc(t.Slots, func(name string) bool { return !named(name) }); at >= 0 {
			problems = append(problems, fmt.Errorf("table %d, slot %d: region %.70q: want 1 to %d bytes of visible ASCII", i, at, t.Slots[at], nameMax))
		}
	}
	if err := errors.Join(problems...); err != nil {
		return nil, err
	}
	homes := &Homes{tables: slices.Clone(tables)}
	for i := range homes.tables {
		homes.tables[i].Slots = slices.Clone(homes.tables[i].Slots)
	}
	return homes, nil
}

const nameMax = 63

func named(region string) bool {
	return region != "" && len(region) <= nameMax && !slices.ContainsFunc([]byte(region), func(b byte) bool { return b <= ' ' || b > '~' })
}

// Home returns the region in whose database a key is claimed, and the version of the table that
// assigns it. It depends only on the key and the tables. For a key from before the first table's
// From it uses that table, and may be wrong: see Table.
func (h *Homes) Home(key idempotency.Key) (region string, version int) {
	table := h.tables[0]
	if made, ok := madeAt(key); ok {
		for _, t := range h.tables[1:] {
			if !made.Before(t.From) {
				table = t
			}
		}
	}
	return table.Slots[Slot(key)], table.Version
}

// Slot of a key: the first 8 bytes of SHA-256 over scope, operation and value, each preceded by its
// length in 8 bytes, modulo SlotsMax; all numbers big-endian. Gateways in other languages can
// compute the same.
func Slot(key idempotency.Key) int {
	return int(score(key.Scope, key.Operation, key.Value) % SlotsMax)
}

func score(parts ...string) uint64 {
	h := sha256.New()
	for _, part := range parts {
		h.Write(binary.BigEndian.AppendUint64(nil, uint64(len(part))))
		h.Write([]byte(part))
	}
	return binary.BigEndian.Uint64(h.Sum(nil))
}

// madeAt returns the time that a UUIDv7 carries.
func madeAt(key idempotency.Key) (time.Time, bool) {
	id, err := uuid.Parse(key.Value)
	if err != nil || id.Version() != 7 || id.Variant() != uuid.RFC4122 {
		return time.Time{}, false
	}
	return time.UnixMilli(int64(binary.BigEndian.Uint64(append([]byte{0, 0}, id[:6]...)))), true
}

// Spread gives each region about the same number of slots. An added region takes slots from all,
// and a removed one gives its own to all; no other slot moves (rendezvous hashing: Thaler and
// Ravishankar, 1998). Without regions there are no slots.
func Spread(regions ...string) []string {
	if len(regions) == 0 {
		return nil
	}
	slots := make([]string, SlotsMax)
	for slot := range slots {
		slots[slot] = slices.MaxFunc(regions, func(a, b string) int {
			return bytes.Compare(weight(a, slot), weight(b, slot))
		})
	}
	return slots
}

func weight(region string, slot int) []byte {
	// The name decides between equal weights, so that the order of the list does not matter.
	return append(binary.BigEndian.AppendUint64(nil, score(region, fmt.Sprint(slot))), region...)
}
