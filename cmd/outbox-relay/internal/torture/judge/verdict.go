package judge

import "fmt"

// Verdict counts what was judged, and every difference.
type Verdict struct {
	Messages int `json:"messages"` // different messages that were confirmed to their writers, and children
	Records  int `json:"records"`  // in the topics
	Effects  int `json:"effects"`
	Parked   int `json:"parked"` // dead-lettered or discarded, with a reason
	Requests int `json:"requests"`
	Calls    int `json:"calls"`

	Lost       int `json:"lost"`         // confirmed, but not in the table, the topic, or without effect, child or call
	Doubled    int `json:"doubled"`      // a second effect, child, order of a request, key of a call, or record of an exactly-once relay
	OutOfOrder int `json:"out_of_order"` // behind a later version of its key
	Phantoms   int `json:"phantoms"`     // an effect or a record of what nobody wrote
	Money      int `json:"money"`        // balances that are not the sum of their effects
	Unsettled  int `json:"unsettled"`    // parked, dead, or unpublished at the end
	Backwards  int `json:"backwards"`    // positions that went back without an order
	Stuck      int `json:"stuck"`        // what did not end or drain in time

	Leaked int `json:"leaked"` // files with a password

	Examples []string `json:"examples,omitempty"`
}

// Held reports whether the promise was kept.
func (v *Verdict) Held() bool {
	return v.Lost+v.Doubled+v.OutOfOrder+v.Phantoms+v.Money+v.Unsettled+v.Backwards+v.Stuck+v.Leaked == 0
}

// Add adds the counts of another round.
func (v *Verdict) Add(o Verdict) {
	v.Messages += o.Messages
	v.Records += o.Records
	v.Effects += o.Effects
	v.Parked += o.Parked
	v.Requests += o.Requests
	v.Calls += o.Calls
	v.Lost += o.Lost
	v.Doubled += o.Doubled
	v.OutOfOrder += o.OutOfOrder
	v.Phantoms += o.Phantoms
	v.Money += o.Money
	v.Unsettled += o.Unsettled
	v.Backwards += o.Backwards
	v.Stuck += o.Stuck
	v.Leaked += o.Leaked
	v.Examples = append(v.Examples, o.Examples...)
}

// examplesMax is how many differences of each kind are described.
const examplesMax = 5

// blame counts a difference, and describes the first few of its kind.
func (v *Verdict) blame(count *int, format string, args ...any) {
	if *count++; *count <= examplesMax {
		v.Examples = append(v.Examples, fmt.Sprintf(format, args...))
	}
}
