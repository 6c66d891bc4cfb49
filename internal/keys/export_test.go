package keys

// ReapBy is Reap with another size of pages.
var ReapBy = reap

// Statements whose plans are looked at.
const (
	ListSQL = listSQL
	FindSQL = findSQL
	ReapSQL = reapSQL
)
