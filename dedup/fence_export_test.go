package dedup

// The statements whose plans are tested.
const (
	FenceNextSQL  = fenceNextSQL
	ReadFencesSQL = readFencesSQL
)
