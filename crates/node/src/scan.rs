//! Finds the buffers that nobody holds and nothing reaches: what clients that died had in their hands, and what
//! they had replaced but not yet retired.
//!
//! 1. *Suspect*: mark every LIVE buffer whose owner was gone when the scan began, or that belongs to the structure
//!    itself; and note every RETIRED one that a dead session never got onto its list.
//! 2. *Mark*: the service tells what its structure reaches; those are no longer suspect, and belong to the
//!    structure from now on, whoever allocated them: so a later scan finds them too once they are replaced. No
//!    buffer goes back to a list between being seen and being noted.
//! 3. *Grace*: every chain that may have replaced a suspect before it was looked for has retired it, or its runner is
//!    dead.
//! 4. *Sweep*: what is still LIVE and suspect becomes RETIRED, and comes back like anything that was retired.
//!
//! Why this is safe: a suspect that is installed nowhere can never be installed, for only its owner has its address
//! and its owner is gone. So at 2 it is either reached, or replaced; and the chain that replaced it retires it in the
//! same turn, which has ended after 3. At 4 nobody is left who knows it.

use crate::mutants;
use crate::node::NodeMemory;
use crate::reclaim::Reclaim;
use crate::session::{Gone, Grace, Sessions};
use farside_remote::arena::Arena;
use farside_remote::arena::class::Class;
use farside_remote::arena::session::SessionId;
use farside_remote::arena::state::{Stage, State, owner};
use farside_remote::service::Service;

/// A scan of one region.
#[derive(Debug)]
pub struct Scan {
    /// Which.
    pub region: u32,
    gone: Gone,
    phase: Phase,
    /// How many buffers it found lost so far.
    pub found: u64,
}

#[derive(Debug)]
enum Phase {
    /// Finish whatever a dead client left in the middle of this class's list.
    Settle {
        class: u8,
    },
    Suspect {
        at: Place,
    },
    Mark {
        cursor: Option<u64>,
        reached: Vec<u64>,
    },
    Wait {
        grace: Option<Grace>,
    },
    Sweep {
        at: Place,
    },
    Done,
}

/// A buffer by its place: segment and ordinal.
#[derive(Clone, Copy, Debug, Default)]
struct Place {
    segment: u32,
    ordinal: u32,
}

impl Scan {
    /// A scan of `region`. Every session that has ended must be closed: its retired list has been taken.
    pub fn new(region: u32, sessions: &Sessions) -> Scan {
        Scan { region, gone: sessions.gone(), phase: Phase::Settle { class: 0 }, found: 0 }
    }

    /// Whether it has ended.
    pub fn is_done(&self) -> bool {
        matches!(self.phase, Phase::Done)
    }

    /// Whether it has seen buffers reachable and not yet made them the structure's. Until it has, none of them may be
    /// reused: it would take a buffer's next life for the one that it saw.
    pub fn is_adopting(&self) -> bool {
        matches!(&self.phase, Phase::Mark { reached, .. } if !reached.is_empty())
    }

    /// Whose turn it waits for.
    pub fn waiting_for(&self) -> impl Iterator<Item = SessionId> + '_ {
        let grace = if let Phase::Wait { grace } = &self.phase { grace.as_ref() } else { None };
        grace.into_iter().flat_map(Grace::waiting_for)
    }

    /// One step. False if it waits for somebody's turn to end, or has ended.
    pub fn step<M: NodeMemory>(
        &mut self,
        memory: &M,
        sessions: &mut Sessions,
        reclaim: &mut Reclaim,
        service: &dyn Service<M>,
    ) -> Result<bool, M::Wait> {
        let arena = Arena::of(memory);
        match &mut self.phase {
            Phase::Settle { class } => match Class::get(*class) {
                Some(of) => {
                    arena.settle(self.region, of)?;
                    *class += 1;
                }
                None => self.phase = Phase::Suspect { at: Place::default() },
            },
            Phase::Suspect { at } => {
                match judge(memory, self.region, *at, |state| self.gone.suspects(state))? {
                    Judged::End => self.phase = Phase::Mark { cursor: Some(0), reached: Vec::new() },
                    Judged::Next { at: next, lost } => {
                        *at = next;
                        self.found += u64::from(lost.is_some());
                        lost.into_iter().for_each(|at| reclaim.add(at));
                    }
                }
            }
            Phase::Mark { cursor, reached } => {
                if let Some(&at) = reached.last() {
                    adopt(memory, self.region, at)?;
                    reached.pop();
                } else if let Some(from) = *cursor {
                    let mut found = Vec::new();
                    *cursor = service.live(memory, from, &mut found)?;
                    *reached = found;
                } else {
                    self.phase = Phase::Wait { grace: None };
                }
            }
            Phase::Wait { .. } if waits_for_nobody() => self.phase = Phase::Sweep { at: Place::default() },
            Phase::Wait { grace: None } => {
                self.phase = Phase::Wait { grace: Some(sessions.begin_grace(memory)?) };
            }
            Phase::Wait { grace: Some(grace) } => {
                if !sessions.is_over(memory, grace)? {
                    return Ok(false);
                }
                self.phase = Phase::Sweep { at: Place::default() };
            }
            Phase::Sweep { at } => match judge(memory, self.region, *at, sweep)? {
                Judged::End => self.phase = Phase::Done,
                Judged::Next { at: next, lost } => {
                    *at = next;
                    self.found += u64::from(lost.is_some());
                    lost.into_iter().for_each(|at| reclaim.add(at));
                }
            },
            Phase::Done => return Ok(false),
        }
        Ok(true)
    }
}

fn waits_for_nobody() -> bool {
    mutants::SWEEP_WITHOUT_GRACE.is_on() || mutants::SCAN_BY_REACHABILITY_ALONE.is_on()
}

impl Gone {
    /// What the first pass makes of a buffer's state.
    fn suspects(&self, state: State) -> State {
        let unheld = self.includes(state.owner) || mutants::SCAN_BY_REACHABILITY_ALONE.is_on();
        match state.stage {
            Stage::Live if unheld => State { suspect: true, ..state },
            // Its session died after it had marked the buffer, before it had linked it.
            Stage::Retired if unheld => State { owner: owner::NODE, ..state },
            _ => state,
        }
    }
}

/// What the last pass makes of a buffer's state.
fn sweep(state: State) -> State {
    match state.stage {
        Stage::Live if state.suspect => {
            State { stage: Stage::Retired, suspect: false, owner: owner::NODE, ..state }
        }
        _ => state,
    }
}

enum Judged {
    End,
    Next {
        at: Place,
        /// A buffer that became RETIRED and the node's.
        lost: Option<u64>,
    },
}

/// Applies `verdict` to the state of the buffer at a place, and finds the next place. If the state changed under it,
/// the same place comes again.
fn judge<M: NodeMemory>(
    memory: &M,
    region: u32,
    at: Place,
    verdict: impl Fn(State) -> State,
) -> Result<Judged, M::Wait> {
    let arena = Arena::of(memory);
    if at.segment >= arena.geometry().segments() {
        return Ok(Judged::End);
    }
    let next_segment = Judged::Next { at: Place { segment: at.segment + 1, ordinal: 0 }, lost: None };
    if at.ordinal == 0 && arena.segment(at.segment)?.region != region {
        return Ok(next_segment);
    }
    let Some((buffer, state)) = arena.buffer_state(at.segment, at.ordinal)? else { return Ok(next_segment) };
    let judged = verdict(state);
    if judged != state && !arena.exchange_state(&buffer, state, judged)? {
        return Ok(Judged::Next { at, lost: None });
    }
    let taken = judged != state && judged.stage == Stage::Retired;
    let next = Place { segment: at.segment, ordinal: at.ordinal + 1 };
    Ok(Judged::Next { at: next, lost: taken.then_some(buffer.at) })
}

/// A buffer that the structure reaches is no suspect, and from now on the structure's.
fn adopt<M: NodeMemory>(memory: &M, region: u32, at: u64) -> Result<(), M::Wait> {
    let arena = Arena::of(memory);
    let Some((_, buffer)) = arena.buffer_at(at)?.filter(|(of, _)| *of == region) else { return Ok(()) };
    loop {
        let state = arena.state(&buffer)?;
        let adopted = State { owner: owner::NONE, suspect: false, ..state };
        if state.stage != Stage::Live || state == adopted || arena.exchange_state(&buffer, state, adopted)? {
            return Ok(());
        }
    }
}
