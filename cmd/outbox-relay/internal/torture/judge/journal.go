package judge

import (
	"fmt"
	"strings"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/scene"
)

// journal judges the entries of a group's journal: each is published, under one ID, in the order of the
// lock that handlers take after they published.
func (j *judgement) journal(g scene.Group) {
	if !g.Journal {
		return
	}
	place := make(map[int64]int, len(j.e.Entries[g.Number]))
	for i, order := range j.e.Entries[g.Number] {
		place[order] = i + 1
	}
	ids, last := map[int64]string{}, 0
	for _, r := range j.e.Records {
		if r.Topic != j.e.JournalTopic(g.Number) {
			continue
		}
		at, entered := place[r.Body.Order]
		o, known := j.e.Orders[r.Body.Order]
		switch first, again := ids[r.Body.Order]; {
		case !entered && j.e.LostCommits:
			continue
		case !entered || !known:
			j.v.blame(&j.v.Phantoms, "%s is an entry of order %d, which no handler committed", r.where(), r.Body.Order)
			continue
		case again && first != r.ID:
			j.v.blame(&j.v.Doubled, "%s is an entry of order %d under a second ID", r.where(), r.Body.Order)
			continue
		case again:
			continue
		}
		ids[r.Body.Order] = r.ID
		j.derived(g, o, r)
		if at < last && !j.e.LostCommits { // an entry may be entered again
			j.v.blame(&j.v.OutOfOrder, "%s: entry %d of the journal comes after entry %d", r.where(), at, last)
		}
		last = max(last, at)
	}
	for order := range place {
		if ids[order] == "" {
			j.v.blame(&j.v.Lost, "group %d: the journal's entry of order %d is not in the topic", g.Number, order)
		}
	}
}

// fences judges what fences let through: each version of a key once, and none behind a later one; and
// the last one.
func (j *judgement) fences(g scene.Group) {
	if !g.Fences {
		return
	}
	last := lastVersions{}
	for _, v := range j.e.Fenced[g.Number] {
		if v.Version == last[v.Key] {
			j.v.blame(&j.v.Doubled, "group %d: a fence let version %d of key %d through twice", g.Number, v.Version, v.Key)
			continue
		}
		j.follow(last, v.Key, v.Version, fmt.Sprintf("group %d: a fence", g.Number))
	}
	for _, f := range j.e.Effects[g.Number] {
		if scene.IsFenced(scene.Body{Order: f.Order, Version: f.Version}) && f.Version > last[f.Key] {
			j.v.blame(&j.v.Lost, "group %d: a fence held back version %d of key %d behind version %d", g.Number, f.Version, f.Key, last[f.Key])
		}
	}
}

// conflicts judges that no group which compares contents dropped a message as a copy of another one.
func (j *judgement) conflicts(g scene.Group) {
	if g.Dedup != "payload" || j.e.LostCommits {
		return
	}
	for order := range j.forged {
		name := fmt.Sprintf("%d/%s%d", g.Number, scene.ForgedPrefix, order)
		if _, discarded := j.e.Discarded[name]; !discarded && !j.deadForged[fmt.Sprintf("%d/%d", g.Number, order)] {
			j.v.blame(&j.v.Lost, "group %d: the message with other content under the ID of order %d was neither parked nor dead-lettered", g.Number, order)
		}
	}
}

// pauses judges that nothing was published while the topic of orders was paused. A relay that was
// frozen, or whose connection hung, may have sent what it had in flight before.
func (j *judgement) pauses() {
	frozen := j.e.Frozen["relay"]
	for what, n := range j.e.Struck {
		if strings.HasPrefix(what, struckRelay) {
			frozen += n
		}
	}
	if frozen > 0 || j.e.Scene.Proxies || j.e.Replayed {
		return
	}
	for _, r := range j.e.Records {
		_, garbage := j.e.Garbage[r.ID]
		if r.Topic != j.e.Topic || garbage || j.e.Copied[r.ID] > 0 || r.Body.Forged {
			continue
		}
		for _, p := range j.e.Paused {
			if r.Partition == p.Partition && r.Offset >= p.From && r.Offset < p.To {
				j.v.blame(&j.v.Phantoms, "%s was published while the topic was paused", r.where())
			}
		}
	}
}

// struckRelay begins what ledgers say of a relay that froze itself.
const struckRelay = "freeze-at relay."
