package keys

// ReapBy is Reap with another size of pages.
var ReapBy = reap

// Statements whose plans a test checks.
const (
	ListSQL = listSQL
	FindSQL = findSQL
	ReapSQL = reapSQL
)
