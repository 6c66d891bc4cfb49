package judge_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/judge"
)

// timed is an ID with a time, in milliseconds.
func timed(at int64) string {
	return fmt.Sprintf("%08x-%04x-7000-8000-000000000000", at>>16, at&0xffff)
}

// Times of IDs: of the round, and of an earlier day.
const (
	recent   = int64(1_700_000_000_000)
	longAgo  = recent - 48*60*60*1000
	atOnce   = recent - 5*60*1000
	oldOrder = plain
)

// aged is a clean round in which one order has an ID of an earlier day.
func aged() *judge.Evidence {
	e := clean()
	e.Scene.Groups[1].Forever = true
	for order, at := range map[int64]int64{forLater: recent, hopeless: atOnce, oldOrder: longAgo} { // those without children and entries
		o := e.Orders[order]
		o.MessageID = timed(at)
		e.Orders[order] = o
		e.Records[place(e, order)].ID = o.MessageID
	}
	return e
}

// Property: a group may park as expired only what is old enough that its claim was forgotten; a copy
// that was discarded then is no loss, and what is missing or doubled behind the decision is.
func TestExpiredIsJudged(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name   string
		plant  func(e *judge.Evidence)
		blamed differences
	}{
		{"nothing expired", func(*judge.Evidence) {}, differences{}},
		{"a copy of an old order was discarded, or the order was retried", func(e *judge.Evidence) {
			e.Expired = []judge.Expired{{Group: loose, Order: oldOrder}, {Group: loose, Order: oldOrder}}
		}, differences{}},
		{"an order that the database lost expired", func(e *judge.Evidence) { e.Expired = []judge.Expired{{Group: loose, Order: 700}} }, differences{}},
		{"a young order expired", func(e *judge.Evidence) { e.Expired = []judge.Expired{{Group: loose, Order: forLater}} }, differences{"unsettled": 1}},
		{"an order of some minutes ago expired", func(e *judge.Evidence) { e.Expired = []judge.Expired{{Group: loose, Order: hopeless}} }, differences{"unsettled": 1}},
		{"an order of a group that keeps claims forever expired", func(e *judge.Evidence) { e.Expired = []judge.Expired{{Group: kid, Order: oldOrder}} }, differences{"unsettled": 1}},
		{"an order of a group that claims nothing expired", func(e *judge.Evidence) {
			e.Scene.Groups[2].Dedup = "position"
			e.Expired = []judge.Expired{{Group: loose, Order: oldOrder}}
		}, differences{"unsettled": 1}},
		{"an old order was discarded without its effect", func(e *judge.Evidence) {
			e.Expired = []judge.Expired{{Group: loose, Order: oldOrder}}
			e.Effects[loose] = without(e.Effects[loose], oldOrder)
		}, differences{"lost": 1}},
		{"an old order has a second effect", func(e *judge.Evidence) {
			e.Expired = []judge.Expired{{Group: loose, Order: oldOrder}}
			e.Effects[loose] = append(e.Effects[loose], effect(e, oldOrder))
		}, differences{"doubled": 1}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			e := aged()
			test.plant(e)
			balance(e)
			v := judge.Judge(e)
			assert.Equal(t, test.blamed, of(t, v), "%v", v.Examples)
		})
	}
}
