//! The scan: finds leaked buffers, which no live client holds and no pointer reaches. A buffer leaks if a client dies
//! while it holds the buffer, or after it has replaced the buffer in a structure and before it retires the buffer.
//!
//! 1. *Suspect*: mark every LIVE buffer whose owner was gone when the scan began, or that belongs to the structure
//!    itself. Reclaim every RETIRED buffer that a dead session never linked into its list.
//! 2. *Mark*: the service reports the buffers that its structure reaches. These buffers are no longer suspect, and
//!    their owner becomes the structure instead of the client that allocated them. So a later scan suspects them again,
//!    and finds them if they were replaced. No buffer is freed between being reported and being recorded.
//! 3. *Grace*: wait until every chain that may have replaced a suspect before step 2 saw the suspect has retired it, or
//!    until the chain's runner is dead.
//! 4. *Sweep*: buffers that are still LIVE and suspect become RETIRED, and are reclaimed like any retired buffer.
//!
//! Safety: a suspect that is not installed can never be installed, since only its owner has its address, and the owner
//! is gone. So in step 2, each suspect is reachable, replaced, or was never installed. The chain that replaced a
//! suspect retires it in the same turn, and that turn has ended after step 3. So in step 4, no process has the address
//! of a remaining suspect.

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
    /// The scanned region.
    pub region: u32,
    gone: Gone,
    phase: Phase,
    /// Number of leaked buffers found so far.
    pub found: u64,
}

#[derive(Debug)]
enum Phase {
    /// Completes the step that a dead client left unfinished on the free list of this class.
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

/// Position of a buffer: its segment and its number in that segment.
#[derive(Clone, Copy, Debug, Default)]
struct Place {
    segment: u32,
    ordinal: u32,
}

impl Scan {
    /// Starts a scan of `region`. Every ended session must be closed before: its retired list must have been taken.
    pub fn new(region: u32, sessions: &Sessions) -> Scan {
        Scan { region, gone: sessions.gone(), phase: Phase::Settle { class: 0 }, found: 0 }
    }

    /// Whether the scan is complete.
    pub fn is_done(&self) -> bool {
        matches!(self.phase, Phase::Done)
    }

    /// Whether the scan has seen reachable buffers that it has not yet recorded as the structure's. Until then none of
    /// these buffers may be reused: the scan would mistake the new allocation for the one that it saw.
    pub fn is_adopting(&self) -> bool {
        matches!(&self.phase, Phase::Mark { reached, .. } if !reached.is_empty())
    }

    /// The sessions whose turn the scan waits for.
    pub fn waiting_for(&self) -> impl Iterator<Item = SessionId> + '_ {
        let grace = if let Phase::Wait { grace } = &self.phase { grace.as_ref() } else { None };
        grace.into_iter().flat_map(Grace::waiting_for)
    }

    /// Makes one step. Returns false if the scan waits for a session's turn to end, or is complete.
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
    /// The state that a buffer in `state` gets in step 1, *suspect*.
    fn suspects(&self, state: State) -> State {
        let unheld = self.includes(state.owner) || mutants::SCAN_BY_REACHABILITY_ALONE.is_on();
        match state.stage {
            Stage::Live if unheld => State { suspect: true, ..state },
            // The session died after it had made the buffer RETIRED and before it had linked the buffer into its list.
            Stage::Retired if unheld => State { owner: owner::NODE, ..state },
            _ => state,
        }
    }
}

/// The state that a buffer in `state` gets in step 4, *sweep*.
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
        /// Address of a leaked buffer, which is now RETIRED and owned by the node.
        lost: Option<u64>,
    },
}

/// Applies `verdict` to the state of the buffer at position `at`, and returns the next position. If the state changed
/// concurrently, returns the same position again.
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

/// Clears the suspicion of a buffer that the structure reaches, and makes the structure its owner.
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
