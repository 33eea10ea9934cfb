//! Broken schemes, which differ from a correct one by one line. Most were published or used.

use crate::holder::mutants as holder;
use crate::lease::mutants as lease;
use crate::redo::mutants as redo;
use farside_remote::mutant::Mutant;

farside_remote::mutants! {
    /// A read by one READ checks nothing but the latch and the version, as in [`super::Reads::Checksum`] without the
    /// checksum (section 3.2, "naive").
    NAIVE_READ = "LatchNaiveRead";
    /// A read accepts an image if the versions of its first and its last line are equal (section 3.2, "header and
    /// footer").
    HEADER_AND_FOOTER = "LatchHeaderAndFooter";
    /// The two READs of a read are sent together, so the NIC may execute them in either order.
    READS_OVERLAP = "LatchReadsOverlap";
    /// The WRITE releases a latch that readers take by FETCH-ADD, which may write a stale word back.
    UNLATCH_UNDER_FAA = "LatchUnlatchUnderFaa";
    /// A writer releases a reader/writer latch by a WRITE of 0, which erases the counts of readers that try to take it.
    RELEASED_BY_WRITE = "LatchReleasedByWrite";
    /// The WRITE releases the latch although its lines may land in any order (relaxed ordering).
    UNLATCH_OUT_OF_ORDER = "LatchUnlatchOutOfOrder";
    /// The READ of the object overwrites the result of the CAS by the latch word that it has read.
    READ_OVER_RESULT = "LatchReadOverResult";
    /// An operation whose future is dropped leaves its latch held.
    DROPPED_KEEPS_LATCH = "LatchDroppedKeepsLatch";
}

/// Broken leases of latches, and broken recoveries of a dead holder over classic verbs.
const LEASES: [Mutant; 4] = [
    lease::TAKEN_UNFENCED,
    redo::RECORD_AFTER_OBJECT,
    redo::STALE_RECORD_REDONE,
    holder::LOCK_OF_DEAD_HOLDER_WRITTEN,
];

/// The broken schemes, and the broken leases.
pub const WITH_LEASES: [Mutant; ALL.len() + LEASES.len()] = {
    let mut all = [LEASES[0]; ALL.len() + LEASES.len()];
    let mut place = 0;
    while place < all.len() {
        all[place] = if place < ALL.len() { ALL[place] } else { LEASES[place - ALL.len()] };
        place += 1;
    }
    all
};
