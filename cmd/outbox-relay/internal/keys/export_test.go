package keys

// Statements whose plans a test checks.
const (
	ListSQL = listSQL
	FindSQL = findSQL
)
