package keys

// ReapBy is Reap with another size of pages.
var ReapBy = reap //nolint:gochecknoglobals // for tests

// Statements whose plans are looked at.
const (
	ListSQL = listSQL
	FindSQL = findSQL
	ReapSQL = reapSQL
)
