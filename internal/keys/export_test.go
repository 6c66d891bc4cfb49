package keys

// Statements whose plans are looked at.
const (
	ListSQL = listSQL
	FindSQL = findSQL
	ReapSQL = reapSQL
)
