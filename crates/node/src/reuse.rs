//! Whether sessions reuse the buffers that they retire in a store: the node's part of
//! [`farside_remote::arena::reuse`].
//!
//! Invariant: while the node, outside of turns, follows pointers in a store, or relies on it that no buffer which it
//! has seen is taken anew, reuse has ended in the store. Scans and rebuilds do so. Reuse has ended when the turns of
//! all sessions have ended, because a session reads the setting within its turn.

use crate::mutants;
use crate::session::{Grace, Sessions};
use farside_remote::Memory;
use farside_remote::arena::Arena;

/// The setting of one store. It is off when the node starts.
#[derive(Debug, Default)]
pub(crate) enum Reuse {
    /// No session reuses a buffer.
    #[default]
    Off,
    On,
    /// The setting is off, but sessions whose turns have not ended may act on the former setting.
    Ending(Grace),
}

impl Reuse {
    /// Makes one step towards the end of reuse in the region. Returns whether it has ended, and whether the step made
    /// progress.
    pub(crate) fn end_step<M: Memory>(
        &mut self,
        memory: &M,
        sessions: &Sessions,
        region: u32,
    ) -> Result<(bool, bool), M::Wait> {
        match self {
            _ if mutants::REUSE_DURING_SCAN.is_on() => return Ok((true, true)),
            Reuse::Off => return Ok((true, true)),
            Reuse::On => {
                Arena::of(memory).set_reuse(region, false)?;
                *self = Reuse::Ending(sessions.begin_grace(memory)?);
            }
            Reuse::Ending(grace) => {
                if !sessions.is_over(memory, grace)? {
                    return Ok((false, false));
                }
                *self = Reuse::Off;
            }
        }
        Ok((false, true))
    }

    /// Begins reuse, unless it is on. Returns whether it was off.
    pub(crate) fn begin<M: Memory>(&mut self, memory: &M, region: u32) -> Result<bool, M::Wait> {
        if matches!(self, Reuse::On) {
            return Ok(false);
        }
        Arena::of(memory).set_reuse(region, true)?;
        *self = Reuse::On;
        Ok(true)
    }

    /// The grace period that the end of reuse waits for.
    pub(crate) fn waiting_for(&self) -> Option<&Grace> {
        match self {
            Reuse::Ending(grace) => Some(grace),
            Reuse::Off | Reuse::On => None,
        }
    }
}
