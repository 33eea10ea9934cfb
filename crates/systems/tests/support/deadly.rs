//! A memory that classifies each access of its process, and kills or stops the process at a given access: before the
//! access, or halfway through the write of an item.

use super::observed::{Made, Observed, Observer};
use super::process::say;
use farside_fabrics::memory::Mapping;
use farside_remote::Memory;
use farside_remote::arena::SESSIONS_MAX;
use farside_remote::arena::class::Class;
use farside_remote::arena::segment::Use;
use farside_remote::arena::session::turn_at;
use farside_remote::arena::state::{Stage, State};
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Purpose of an access to memory, in terms of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum Access {
    ReadSecret,
    ReadSlot,
    ReadItem,
    ReadSegment,
    ReadListHead,
    ReadState,
    ReadSession,
    /// Access that claims a free list's first buffer for this session.
    TakeDecide,
    /// Access that makes a taken buffer LIVE.
    TakeMakeLive,
    TakeFinish,
    /// Access that claims the next unused buffer of a segment for this session.
    BumpDecide,
    BumpFinish,
    /// Access that claims a granted segment for a class.
    RefillDecide,
    RefillSegment,
    RefillCurrent,
    RefillFinish,
    WriteItem,
    /// The CAS that installs an item in a slot.
    SwingSlot,
    /// Access that makes a buffer RETIRED.
    RetireMark,
    /// Access that links a retired buffer to the session's list. It is made only if the node has taken the list since
    /// the session read the list's head.
    RetireLink,
    RetireListHead,
    /// Read of whether sessions reuse buffers in the region.
    ReadReuse,
    /// Read of the memory's epoch, or of the number of slots.
    ReadEpoch,
    AdvanceEpoch,
    /// Access that moves a list of retired buffers: it begins at the next place, then ends at the former one.
    MoveList,
    /// Access that takes a retired buffer from this session's own list.
    ReuseDecide,
    /// Access that makes a retired buffer LIVE.
    ReuseMakeLive,
    WriteCounters,
    Other,
}

impl Access {
    /// Accesses that every client makes sooner or later by puts, deletes and large puts.
    pub(crate) const ALL: [Access; 27] = [
        Access::ReadSecret,
        Access::ReadSlot,
        Access::ReadItem,
        Access::ReadSegment,
        Access::ReadListHead,
        Access::ReadState,
        Access::ReadSession,
        Access::TakeDecide,
        Access::TakeMakeLive,
        Access::TakeFinish,
        Access::BumpDecide,
        Access::BumpFinish,
        Access::RefillDecide,
        Access::RefillSegment,
        Access::RefillCurrent,
        Access::RefillFinish,
        Access::WriteItem,
        Access::SwingSlot,
        Access::RetireMark,
        Access::RetireListHead,
        Access::ReadReuse,
        Access::ReadEpoch,
        Access::AdvanceEpoch,
        Access::MoveList,
        Access::ReuseDecide,
        Access::ReuseMakeLive,
        Access::WriteCounters,
    ];
}

/// Plan to kill or stop a process at one of its accesses.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Strike {
    /// Purpose of the access at which the strike comes.
    pub(crate) access: Access,
    /// Number of earlier accesses with the same purpose.
    pub(crate) nth: u64,
    /// Whether the process is stopped instead of killed.
    pub(crate) stop: bool,
}

/// Observer that kills or stops its own process.
pub(crate) struct Deadly {
    strike: Option<Strike>,
    /// Number of accesses so far, by purpose.
    pub(crate) seen: RefCell<BTreeMap<Access, u64>>,
}

impl Deadly {
    /// Wraps a memory with an observer that has counted no access yet.
    pub(crate) fn over(mapping: Arc<Mapping>, strike: Option<Strike>) -> Observed<Deadly> {
        Observed { mapping, observer: Deadly { strike, seen: RefCell::default() } }
    }
}

impl Observer for Deadly {
    fn before(&self, memory: &Mapping, at: u64, made: &Made<'_>) {
        let access = classify(memory, at, made);
        let nth = {
            let mut seen = self.seen.borrow_mut();
            let count = seen.entry(access).or_default();
            *count += 1;
            *count - 1
        };
        let Some(strike) = self.strike.filter(|strike| strike.access == access && strike.nth == nth) else {
            return;
        };
        if let Made::Write(bytes) = made {
            let Ok(()) = memory.write(at, &bytes[..bytes.len() / 2]);
        }
        say("struck", &access);
        let signal = if strike.stop { Signal::STOP } else { Signal::KILL };
        rustix::process::kill_process(rustix::process::getpid(), signal).expect("a signal to oneself");
        // Another thread may have to take the signal, and then stops this one.
        while is_pending(Signal::STOP) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Whether a signal was sent to this process that none of its threads has taken yet.
fn is_pending(signal: Signal) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux has this file");
    let signals =
        status.lines().find_map(|line| line.strip_prefix("ShdPnd:")).expect("Linux writes this line");
    let signals = u64::from_str_radix(signals.trim(), 16).expect("a set of signals");
    signals & 1 << (signal.as_raw() - 1) != 0
}

fn classify(memory: &Mapping, at: u64, made: &Made<'_>) -> Access {
    let sessions_at = turn_at(0) - 64;
    let segments_at = sessions_at + u64::from(SESSIONS_MAX) * (turn_at(1) - turn_at(0));
    match at {
        _ if at < 4096 => match made {
            Made::Read => Access::ReadEpoch,
            Made::Write(_) => Access::Other,
            Made::Exchange { .. } => Access::AdvanceEpoch,
        },
        _ if at < sessions_at => region_record((at - 4096) % 4096, made),
        _ if at < segments_at => match made {
            Made::Read => Access::ReadSession,
            Made::Write(_) => Access::WriteCounters,
            Made::Exchange { old, new } => {
                list_head((at - sessions_at) % (turn_at(1) - turn_at(0)), *old, *new)
            }
        },
        _ => match memory.geometry().segment_of(at) {
            None => segment_entry(made),
            Some(index) => data(memory, index, at, made),
        },
    }
}

fn data(memory: &Mapping, index: u32, at: u64, made: &Made<'_>) -> Access {
    let Ok(segment) = memory.arena().segment(index);
    let class = match segment.usage {
        Use::Buffers(class) => Class::get(class).expect("a class"),
        _ => {
            return match made {
                Made::Read => Access::ReadSlot,
                Made::Exchange { .. } => Access::SwingSlot,
                Made::Write(_) => Access::Other,
            };
        }
    };
    if at - memory.geometry().segment_at(index) >= u64::from(class.count) * 16 {
        return match made {
            Made::Read => Access::ReadItem,
            Made::Write(_) => Access::WriteItem,
            Made::Exchange { .. } => Access::Other,
        };
    }
    match made {
        Made::Read => Access::ReadState,
        Made::Write(_) => Access::Other,
        Made::Exchange { old, new } => match (State::unpack(*old).stage, State::unpack(*new).stage) {
            (Stage::Retired, Stage::Live) => Access::ReuseMakeLive,
            (_, Stage::Live) => Access::TakeMakeLive,
            (Stage::Live, Stage::Retired) => Access::RetireMark,
            (Stage::Retired, Stage::Retired) => Access::RetireLink,
            _ => Access::Other,
        },
    }
}

/// Classifies an exchange of the head of one of a session's lists, whose layout is in `arena::session`.
fn list_head(offset: u64, old: u128, new: u128) -> Access {
    const GATHERING: u64 = 128;
    const READY: u64 = 160;
    const NODE: u64 = 176;
    let has_first = |head: u128| head as u64 & ((1 << 48) - 1) != 0;
    match offset {
        GATHERING | NODE if has_first(new) => Access::RetireListHead,
        READY if has_first(old) => Access::ReuseDecide,
        _ => Access::MoveList,
    }
}

/// Classifies an access to a region's record, whose layout is in `arena::lists`.
fn region_record(offset: u64, made: &Made<'_>) -> Access {
    let phase = |new: &u128| new & 0xf;
    match (offset, made) {
        (0, Made::Read) => Access::ReadSecret,
        (8, Made::Read) => Access::ReadReuse,
        (_, Made::Read) => Access::ReadListHead,
        (64 | 80, Made::Exchange { new, .. }) if phase(new) != 0 => Access::RefillDecide,
        (64 | 80, Made::Exchange { .. }) => Access::RefillFinish,
        (_, Made::Exchange { .. }) if !(offset - 128).is_multiple_of(64) => Access::RefillCurrent,
        (_, Made::Exchange { new, .. }) => match phase(new) {
            0 => Access::TakeFinish,
            1 => Access::TakeDecide,
            _ => Access::Other,
        },
        (_, Made::Write(_)) => Access::Other,
    }
}

/// Classifies an access to an entry of the segment table, whose layout is in `arena::segment`.
fn segment_entry(made: &Made<'_>) -> Access {
    const GRANTED: u8 = 0xfe;
    match made {
        Made::Read => Access::ReadSegment,
        Made::Write(_) => Access::Other,
        Made::Exchange { old, .. } if (old >> 16) as u8 == GRANTED => Access::RefillSegment,
        Made::Exchange { new, .. } if (new >> 24) as u8 != 0 => Access::BumpDecide,
        Made::Exchange { .. } => Access::BumpFinish,
    }
}
