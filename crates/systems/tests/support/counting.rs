//! The system's allocator, which also counts.
//!
//! Invariant: what is counted is what the thread itself asked for; other threads may do as they like.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    /// Blocks that this thread has asked for.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// To be made the global allocator of the test that counts.
pub(crate) struct Counting;

/// Blocks that this thread has asked for so far.
pub(crate) fn allocations() -> u64 {
    ALLOCATIONS.get()
}

fn count() {
    // A thread that is ending has no counter any more, and is not the one that is measured.
    let _counted = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
}

// SAFETY: every call is handed on to the system's allocator unchanged; counting neither allocates nor unwinds.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps the contract, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: as above.
        unsafe { System.realloc(block, layout, size) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(block, layout) }
    }
}
