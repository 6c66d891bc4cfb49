package judge

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"strconv"
	"strings"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/scene"
)

// The rules by which IDs and keys are derived, as they are documented: a repetition, a copy or another
// program has to arrive at the same. They are written here again, because the judge shares no code
// with what it judges.

// id is the bytes of an ID, nil if it is none.
func id(text string) []byte {
	raw, err := hex.DecodeString(strings.ReplaceAll(text, "-", ""))
	if err != nil || len(raw) != 16 {
		return nil
	}
	return raw
}

// text is the usual form of an ID.
func text(raw []byte) string {
	h := hex.EncodeToString(raw)
	return strings.Join([]string{h[:8], h[8:12], h[12:16], h[16:20], h[20:]}, "-")
}

// hashed makes an ID without a time of a hash.
func hashed(sum [sha256.Size]byte) string {
	raw := sum[:16]
	raw[0] |= 0x80
	raw[6] = raw[6]&0x0f | 0x80
	raw[8] = raw[8]&0x3f | 0x80
	return text(raw)
}

// childOf reports whether an ID is that of a message that was published by the handler of another
// one. Its first six bytes are a time, which depends on when a parked message was released.
func childOf(child, parent, step string) bool {
	raw, from := id(child), id(parent)
	if raw == nil || from == nil {
		return false
	}
	want := sha256.Sum256(append(from, step...))
	want[6] = want[6]&0x0f | 0x70
	want[8] = want[8]&0x3f | 0x80
	return string(raw[6:]) == string(want[6:16])
}

// callKeyOf is the key of a consumer's call.
func callKeyOf(consumer, parent, step string) string {
	var all []byte
	for _, part := range []string{consumer, string(id(parent)), step} {
		all = append(binary.BigEndian.AppendUint32(all, uint32(len(part))), part...)
	}
	return hashed(sha256.Sum256(all))
}

// requestKeyOf is the key of a call in a phase of a request.
func requestKeyOf(tenant, operation, key, phase string) string {
	var all []byte
	for _, part := range []string{"child", tenant, operation, key, phase} {
		all = append(binary.BigEndian.AppendUint64(all, uint64(len(part))), part...)
	}
	inner := sha256.Sum256(all)
	const domain = "effectonce:idempotency"
	return hashed(sha256.Sum256(append(append(binary.BigEndian.AppendUint32(nil, uint32(len(domain))), domain...), inner[:]...)))
}

// callKey is the key of the call for a thing, if it follows from what is known.
func (j *judgement) callKey(what string) (key string, known bool) {
	owner, name, _ := strings.Cut(what, "/")
	if owner == scene.Requests {
		return requestKeyOf(scene.Tenant, scene.OperationCharged, name, scene.StepCharge), true
	}
	group, _ := strconv.ParseInt(owner, 10, 16)
	order, _ := strconv.ParseInt(name, 10, 64)
	o, known := j.e.Orders[order]
	return callKeyOf(j.e.Consumer(int16(group)), o.MessageID, scene.StepCharge), known
}

// derived judges the ID of what the handler of an order published.
func (j *judgement) derived(g scene.Group, parent Order, r Record) {
	if step := g.ChildStep(r.Body.Order); j.e.Scene.Rival == "" && !childOf(r.ID, parent.MessageID, step) {
		j.v.blame(&j.v.Doubled, "%s has ID %s, which is not the documented one of step %s of message %s: a repetition would have another", r.where(), r.ID, step, parent.MessageID)
	}
}
