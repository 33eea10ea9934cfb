//! The state of a buffer: one 16-byte word beside it that no key covers.
//!
//! `| next 48 bits, stage 8, suspect 8 | owner u32 | count u32 |`. `next` links whatever list the buffer is on.
//! Invariant: `count` grows with every ALLOCATE, so no state of a later life equals one of an earlier.
//!
//! ```text
//! UNUSED --take--> LIVE --retire--> RETIRED --give--> FREE --take--> LIVE
//!                    ^--- give back what a chain reserved and did not use: LIVE --give--> FREE
//! FREE --take by the node--> PARKED: its segment is being emptied
//! ```

/// Where a buffer is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Stage {
    /// Never allocated since its segment was granted.
    Unused = 0,
    /// On its class's free list.
    Free = 1,
    /// Allocated: in the hands of its owner, or reachable through what the owner installed.
    Live = 2,
    /// Given back; old pointers to it may still be followed.
    Retired = 3,
    /// Taken off the free list by the node, so that its segment can be taken back.
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

/// Who holds a buffer: a session's number, or one of these.
pub mod owner {
    /// Nobody: it was seen reachable, so it belongs to the store's own structure.
    pub const NONE: u32 = 0;
    /// The node itself.
    pub const NODE: u32 = u32::MAX;
    /// The store's service, by the node's CPU: reachable, or about to be. No scan doubts it while the node lives;
    /// after that, what is not reachable was in the middle of a call.
    pub const SERVICE: u32 = u32::MAX - 1;
}

/// The word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    /// The next buffer of the list that this one is on; 0 at its end.
    pub next: u64,
    /// Where it is in its life.
    pub stage: Stage,
    /// Set by a scan on what it may find unreachable; any change of stage clears it.
    pub suspect: bool,
    /// Who allocated or retired it.
    pub owner: u32,
    /// How often it was allocated.
    pub count: u32,
}

const NEXT_BITS: u32 = 48;

impl State {
    /// From the word in memory. One that no step ever writes is damaged by a peer: nobody's, and nothing is done
    /// with it.
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

    /// To the word in memory.
    pub const fn pack(self) -> u128 {
        self.next as u128
            | (self.stage as u128) << NEXT_BITS
            | (self.suspect as u128) << 56
            | (self.owner as u128) << 64
            | (self.count as u128) << 96
    }

    /// This buffer in its next life, in the hands of `owner`. Keeps `next`, which whoever completes the step of
    /// another needs.
    pub(crate) const fn taken(self, stage: Stage, owner: u32) -> State {
        State { stage, owner, suspect: false, count: self.count.wrapping_add(1), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_survives_its_word() {
        for stage in [Stage::Unused, Stage::Free, Stage::Live, Stage::Retired, Stage::Parked] {
            for suspect in [false, true] {
                let state = State { next: 0xffff_ffff_fff0, stage, suspect, owner: u32::MAX, count: 7 };
                assert_eq!(State::unpack(state.pack()), state);
            }
        }
    }
}
