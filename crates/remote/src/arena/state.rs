//! The state of a buffer: one 16-byte word at the start of the buffer's segment, which no key covers.
//!
//! `| next 48 bits, stage 8, suspect 8 | owner u32 | count u32 |`. `next` links the list that the buffer is on.
//! Invariant: `count` grows with every ALLOCATE, so no state after an ALLOCATE equals one before it.
//!
//! ```text
//! UNUSED --take--> LIVE --retire--> RETIRED --give--> FREE --take--> LIVE
//!                    ^--- a chain frees a buffer that it reserved and did not use: LIVE --give--> FREE
//! RETIRED --reuse by the session that retired it--> LIVE
//! FREE --take by the node--> PARKED: its segment is being emptied
//! ```

/// Stage of a buffer's lifecycle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Stage {
    /// Never allocated since its segment was granted.
    Unused = 0,
    /// On its class's free list.
    Free = 1,
    /// Allocated: held by its owner, or reachable through a structure into which the owner installed it.
    Live = 2,
    /// Retired: chains may still follow old pointers to the buffer.
    Retired = 3,
    /// Taken off the free list by the node, so that its segment can be freed.
    Parked = 4,
}

impl Stage {
    const fn from_u8(stage: u8) -> Stage {
        match stage {
            1 => Stage::Free,
            2 => Stage::Live,
            3 => Stage::Retired,
            4 => Stage::Parked,
            _ => Stage::Unused,
        }
    }
}

/// The values of a buffer's owner that are not a session's number.
pub mod owner {
    /// No owner: a scan saw that the buffer is reachable, so it belongs to the store's structure.
    pub const NONE: u32 = 0;
    /// Owner of buffers that the node itself holds.
    pub const NODE: u32 = u32::MAX;
    /// The store's service, which runs on the node's CPU: the buffer is reachable, or is about to be. No scan suspects
    /// it while the node lives. After the node's death, such a buffer that is unreachable was part of an unfinished
    /// call.
    pub const SERVICE: u32 = u32::MAX - 1;
}

/// The decoded state word of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    /// Next buffer on the same list; 0 at the end.
    pub next: u64,
    /// Stage of the lifecycle.
    pub stage: Stage,
    /// Set by a scan on buffers that may be unreachable; cleared by any change of stage.
    pub suspect: bool,
    /// Session that allocated or retired the buffer, or a value of [`owner`].
    pub owner: u32,
    /// Number of times that the buffer was allocated.
    pub count: u32,
}

const NEXT_BITS: u32 = 48;

impl State {
    /// Decodes the word in memory. A damaged word, whose value no step writes, decodes as an unused buffer owned by the
    /// node: every step leaves such a buffer alone.
    pub const fn unpack(word: u128) -> State {
        let (stage, suspect) = ((word >> NEXT_BITS) as u8, (word >> 56) as u8);
        if stage > Stage::Parked as u8 || suspect > 1 {
            return State { next: 0, stage: Stage::Unused, suspect: false, owner: owner::NODE, count: 0 };
        }
        State {
            next: word as u64 & ((1 << NEXT_BITS) - 1),
            stage: Stage::from_u8(stage),
            suspect: suspect != 0,
            owner: (word >> 64) as u32,
            count: (word >> 96) as u32,
        }
    }

    /// Encodes the word as stored in memory.
    pub const fn pack(self) -> u128 {
        self.next as u128
            | (self.stage as u128) << NEXT_BITS
            | (self.suspect as u128) << 56
            | (self.owner as u128) << 64
            | (self.count as u128) << 96
    }

    /// The state after `owner` took the buffer. Keeps `next`, which a helper needs to complete the step.
    pub(crate) const fn taken(self, stage: Stage, owner: u32) -> State {
        State { stage, owner, suspect: false, count: self.count.wrapping_add(1), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_round_trips_through_its_word() {
        for stage in [Stage::Unused, Stage::Free, Stage::Live, Stage::Retired, Stage::Parked] {
            for suspect in [false, true] {
                let state = State { next: 0xffff_ffff_fff0, stage, suspect, owner: u32::MAX, count: 7 };
                assert_eq!(State::unpack(state.pack()), state);
            }
        }
    }
}
