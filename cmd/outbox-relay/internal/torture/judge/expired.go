package judge

import (
	"strconv"
	"strings"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/scene"
)

// keptAtLeast is for how long claims are kept however short the window is, in milliseconds: less than
// what maintenance adds to the shortest window, and more than a round takes.
const keptAtLeast = 60 * 60 * 1000

// expired judges that only what may have been handled before was parked as expired: messages whose
// IDs are older than all claims that may have been forgotten, of groups that forget claims. What an
// operator did with it is judged by the effects.
func (j *judgement) expired() {
	newest := int64(0)
	for _, o := range j.e.Orders {
		at, _ := idTime(o.MessageID)
		newest = max(newest, at)
	}
	groups := map[int16]scene.Group{}
	for _, g := range j.e.Scene.Groups {
		groups[g.Number] = g
	}
	for _, x := range j.e.Expired {
		o, known := j.e.Orders[x.Order]
		at, timed := idTime(o.MessageID)
		switch g := groups[x.Group]; {
		case !known:
			continue // other checks blame the record
		case g.Forever || g.Dedup == "position":
			j.v.blame(&j.v.Unsettled, "group %d: order %d was parked as expired, by a group that forgets nothing", x.Group, x.Order)
		case !timed || newest-at < keptAtLeast:
			j.v.blame(&j.v.Unsettled, "group %d: order %d was parked as expired, although its claim cannot be forgotten yet", x.Group, x.Order)
		}
	}
}

// idTime is the time of a UUIDv7, in milliseconds: its first 48 bits. Other IDs have none.
func idTime(id string) (at int64, timed bool) {
	digits := strings.ReplaceAll(id, "-", "")
	if len(digits) != 32 || digits[12] != '7' {
		return 0, false
	}
	at, err := strconv.ParseInt(digits[:12], 16, 64)
	return at, err == nil
}
