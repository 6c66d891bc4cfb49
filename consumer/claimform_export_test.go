package consumer

// ClaimForm is the choice of forms without an engine.
type ClaimForm struct{ claimForm }

func NewClaimForm() *ClaimForm { return &ClaimForm{newClaimForm()} }

func (f *ClaimForm) Trusts() bool         { return f.trusts() }
func (f *ClaimForm) Asked(duplicates int) { f.asked(duplicates) }
func (f *ClaimForm) Refused()             { f.refused() }
func (f *ClaimForm) Succeeded()           { f.succeeded() }

// Bounds of the choice.
const CleanMin, CleanMax, GoodRun = cleanMin, cleanMax, goodRun
