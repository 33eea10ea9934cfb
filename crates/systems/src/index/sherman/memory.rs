//! Memory of nodes: units, which clients claim without the node's CPU.
//!
//! A client claims units by CAS of their states from 0 to its nonce, several at a time. A counter at the member says
//! which units to try first. A node is never unlinked, so a unit that was linked is never free again, and a client
//! never follows a pointer to a unit that was reused. A client that leaves frees the units that it has not used; what
//! dead clients have left behind is freed by `heal`.
//!
//! Invariant: the client whose nonce is in a state is the only one that writes to the unit or links it.

use super::layout::Far;
use super::session::{Session, refused};
use crate::index::IndexError;
use farside_remote::clock::Clock;
use farside_remote::{ChainBuf, Fabric, Mode, Reply, Status, cas, fetch_add};
use std::cell::{Cell, RefCell};
use zerocopy::little_endian::U64;

/// Number of units that a client claims at once.
const BATCH: u64 = 8;
/// Number of CAS in one chain.
const CAS_PER_CHAIN: usize = 32;

/// The units that a client has claimed and not yet used.
#[derive(Debug, Default)]
pub(super) struct Units {
    free: RefCell<Vec<Far>>,
    next_member: Cell<usize>,
}

impl Units {
    /// Number of units that the client has claimed and not used yet.
    pub(super) fn spare(&self) -> usize {
        self.free.borrow().len()
    }

    /// Takes a unit, at the members in turn.
    ///
    /// # Errors
    /// [`IndexError::OutOfMemory`] if no member has a free unit.
    pub(super) async fn take<F: Fabric + Clock>(&self, session: &Session<F>) -> Result<Far, IndexError> {
        let members = session.layout.members.len();
        let first = self.next_member.replace((self.next_member.get() + 1) % members);
        for member in (0..members).map(|index| (first + index) % members) {
            loop {
                if let Some(unit) = self.pop(member) {
                    return Ok(unit);
                }
                if !self.refill(session, member).await? {
                    break;
                }
            }
        }
        Err(IndexError::OutOfMemory)
    }

    fn pop(&self, member: usize) -> Option<Far> {
        let mut free = self.free.borrow_mut();
        let index = free.iter().rposition(|unit| unit.member() == member)?;
        Some(free.remove(index))
    }

    /// Takes back a unit that no pointer names. No request for it is in flight.
    pub(super) fn give_back(&self, unit: Far) {
        self.free.borrow_mut().push(unit);
    }

    /// Claims units of a member. Returns false if none is free.
    async fn refill<F: Fabric + Clock>(
        &self,
        session: &Session<F>,
        member: usize,
    ) -> Result<bool, IndexError> {
        let (layout, table) = (&session.layout, &session.layout.members[member]);
        let (mut buffer, mut reply, step) = (ChainBuf::new(), Reply::new(), U64::new(BATCH));
        let mut chain = buffer.begin(table.key());
        let hint = chain.also(fetch_add(layout.addr(layout.hint(member), 8)?, &step));
        session.fabric.run(table.node, &chain, &mut reply).await.map_err(IndexError::of_read)?;
        let first = reply.get(hint).map_err(refused)?.get();
        let fresh: Vec<u64> =
            (first..first.saturating_add(BATCH)).filter(|unit| *unit < table.pieces).collect();
        if self.claim(session, member, &fresh).await? {
            return Ok(true);
        }
        // The counter is at its end, or wrong.
        let states = session.words(layout.state(member, 0), table.pieces).await?;
        let free: Vec<u64> =
            (0..).zip(states).filter(|(_, state)| *state == 0).map(|(unit, _)| unit).collect();
        for batch in free.chunks(BATCH as usize) {
            if self.claim(session, member, batch).await? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    async fn claim<F: Fabric + Clock>(
        &self,
        session: &Session<F>,
        member: usize,
        units: &[u64],
    ) -> Result<bool, IndexError> {
        let nonce = session.nonce().get();
        let units: Vec<Far> = units.iter().map(|unit| session.layout.unit(member, *unit)).collect();
        let claimed = swap(session, &units, 0, nonce).await?;
        let is_any = !claimed.is_empty();
        self.free.borrow_mut().extend(claimed);
        Ok(is_any)
    }

    /// Frees the units that the client has not used.
    pub(super) async fn drain<F: Fabric + Clock>(&self, session: &Session<F>) {
        let units = self.free.take();
        let _else_heal_frees_them = swap(session, &units, session.nonce().get(), 0).await;
    }
}

/// Changes the states of units that have the state `from`. Returns these units.
pub(super) async fn swap<F: Fabric + Clock>(
    session: &Session<F>,
    units: &[Far],
    from: u64,
    to: u64,
) -> Result<Vec<Far>, IndexError> {
    let (layout, mut swapped) = (&session.layout, Vec::new());
    let [from, to] = [from, to].map(U64::new);
    let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
    for (member, table) in layout.members.iter().enumerate() {
        let units: Vec<Far> = units.iter().copied().filter(|unit| unit.member() == member).collect();
        for batch in units.chunks(CAS_PER_CHAIN) {
            let mut chain = buffer.begin(table.key());
            for unit in batch {
                let state = layout.state(member, layout.unit_at(*unit)?);
                chain.also(cas(Mode::Eq, layout.addr(state, 8)?, &from, &to));
            }
            session.fabric.run(table.node, &chain, &mut reply).await.map_err(IndexError::of_read)?;
            for (index, unit) in batch.iter().enumerate() {
                match reply.status_at(index) {
                    Some(Status::Ok) => swapped.push(*unit),
                    Some(Status::CasFailed) => {}
                    status => return Err(refused(status.unwrap_or(Status::Invalid))),
                }
            }
        }
    }
    Ok(swapped)
}
