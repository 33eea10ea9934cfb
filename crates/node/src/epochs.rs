//! Retired buffers of stores whose clients follow a pointer in a later chain than the one that has read it. The turns
//! of sessions do not protect such buffers, since a turn ends between two chains.
//!
//! Clients of such a store lease an id, and publish in its entry an epoch that says which of their operations have
//! ended ([`farside_remote::leases`]). Once no turn protects a buffer any more, a *snapshot* notes the holder and the
//! epoch of each id. The snapshot's buffers are free for reuse when each noted holder
//!
//! * has raised its epoch by two, or
//! * no longer holds the id, or
//! * is fenced, so that none of its chains runs.
//!
//! Two advances are needed: a holder that has published E may run operations that it began in E - 1 and in E. A holder
//! that claims its id after the snapshot began its operations after the retirement, so no snapshot waits for it.
//!
//! Invariant: a snapshot begins after its buffers were retired.
//! Invariant: the entries are untrusted. Whatever they hold, only buffers of their own store are reused early or late.

use crate::mutants;
use farside_remote::Memory;
use farside_remote::leases::{ENTRY_SIZE, Holder, LeaseTable};
use std::collections::BTreeMap;

/// Number of entries that one step reads.
const ENTRIES_PER_STEP: u16 = 8;
/// Number of times that a holder must raise its epoch.
const ADVANCES: u64 = 2;

/// The stores whose clients have epochs.
pub(crate) trait Leased {
    /// Whether there is any such store.
    fn is_any(&self) -> bool;

    /// The table of leases of the store with this region; `None` if the store has none, or was dropped.
    fn table(&self, region: u32) -> Option<LeaseTable>;

    /// Whether the client with this nonce is fenced for the store with this region, and none of its chains runs.
    fn is_fenced(&self, region: u32, nonce: u64) -> bool;
}

/// The buffers that wait for clients' epochs.
#[derive(Debug, Default)]
pub(crate) struct Epochs {
    regions: BTreeMap<u32, Waiting>,
    /// The region of the next step, or below it.
    next: u32,
    /// Buffers that no operation can reach any more.
    pub(crate) ready: Vec<u64>,
}

/// Buffers of one region.
#[derive(Debug, Default)]
struct Waiting {
    /// Buffers for the next snapshot.
    added: Vec<u64>,
    snapshot: Option<Snapshot>,
}

#[derive(Debug)]
struct Snapshot {
    buffers: Vec<u64>,
    table: LeaseTable,
    /// Index of the next entry to note. The snapshot is complete when it is the number of ids.
    next: u16,
    /// Indices of the entries whose holders may still run an operation, with what they held.
    holders: Vec<(u16, Holder)>,
}

impl Snapshot {
    fn new(buffers: Vec<u64>, table: LeaseTable) -> Snapshot {
        Snapshot { buffers, table, next: 0, holders: Vec::new() }
    }
}

impl Epochs {
    /// Adds a retired buffer of a region with a table of leases.
    pub(crate) fn add(&mut self, region: u32, at: u64) {
        self.regions.entry(region).or_default().added.push(at);
    }

    /// Number of regions with buffers that wait.
    pub(crate) fn regions(&self) -> usize {
        self.regions.len()
    }

    /// Number of the client id for which the buffers of a region wait, if they wait for any.
    pub(crate) fn waits_for(&self, region: u32) -> Option<u16> {
        let snapshot = self.regions.get(&region)?.snapshot.as_ref()?;
        let is_complete = snapshot.next >= snapshot.table.ids;
        snapshot.holders.last().filter(|_| is_complete).map(|(index, _)| index + 1)
    }

    /// Keeps only buffers for which `keeps` returns true.
    pub(crate) fn retain(&mut self, keeps: impl Fn(u64) -> bool) {
        for waiting in self.regions.values_mut() {
            waiting.added.retain(|&at| keeps(at));
            if let Some(snapshot) = &mut waiting.snapshot {
                snapshot.buffers.retain(|&at| keeps(at));
            }
        }
        self.regions.retain(|_, waiting| {
            let in_snapshot = waiting.snapshot.as_ref().is_some_and(|snapshot| !snapshot.buffers.is_empty());
            in_snapshot || !waiting.added.is_empty()
        });
        self.ready.retain(|&at| keeps(at));
    }

    /// Makes one step for one region. Returns false if it waits for a client, or if no buffer waits.
    pub(crate) fn step<M: Memory>(&mut self, memory: &M, leased: &impl Leased) -> Result<bool, M::Wait> {
        let next = self.regions.range(self.next..).next().or_else(|| self.regions.iter().next());
        let Some(region) = next.map(|(&region, _)| region) else { return Ok(false) };
        let Some(waiting) = self.regions.get_mut(&region) else { return Ok(false) };
        let Some(table) = leased.table(region) else {
            // The store is being dropped, and its key was revoked before the grace period of the buffers' turns.
            self.ready.append(&mut waiting.added);
            self.ready.extend(waiting.snapshot.take().into_iter().flat_map(|snapshot| snapshot.buffers));
            self.regions.remove(&region);
            return Ok(true);
        };
        let made = match &mut waiting.snapshot {
            None => {
                waiting.snapshot = Some(Snapshot::new(std::mem::take(&mut waiting.added), table));
                true
            }
            Some(snapshot) if snapshot.table != table => {
                *snapshot = Snapshot::new(std::mem::take(&mut snapshot.buffers), table);
                true
            }
            Some(snapshot) if snapshot.next < table.ids => {
                note(memory, region, snapshot, leased)?;
                true
            }
            Some(snapshot) => {
                let made = check(memory, region, snapshot, leased)?;
                if snapshot.holders.is_empty() {
                    self.ready.append(&mut snapshot.buffers);
                    waiting.snapshot = None;
                    if waiting.added.is_empty() {
                        self.regions.remove(&region);
                    }
                    true
                } else {
                    made
                }
            }
        };
        self.next = region + 1;
        Ok(made)
    }
}

fn holder_at<M: Memory>(memory: &M, table: LeaseTable, index: u16) -> Result<Holder, M::Wait> {
    let mut entry = [0; ENTRY_SIZE as usize];
    memory.read(table.entry_at(index), &mut entry)?;
    Ok(Holder::of(&entry))
}

/// Notes the holders of the next entries.
fn note<M: Memory>(
    memory: &M,
    region: u32,
    snapshot: &mut Snapshot,
    leased: &impl Leased,
) -> Result<(), M::Wait> {
    let end = snapshot.table.ids.min(snapshot.next.saturating_add(ENTRIES_PER_STEP));
    let mut noted = Vec::new();
    for index in snapshot.next..end {
        let holder = holder_at(memory, snapshot.table, index)?;
        if holder.nonce != 0 && !leased.is_fenced(region, holder.nonce) {
            noted.push((index, holder));
        }
    }
    snapshot.holders.append(&mut noted);
    snapshot.next = end;
    Ok(())
}

/// Drops noted holders whose operations have ended. Returns whether there were any.
fn check<M: Memory>(
    memory: &M,
    region: u32,
    snapshot: &mut Snapshot,
    leased: &impl Leased,
) -> Result<bool, M::Wait> {
    let advances = if mutants::EPOCH_ONE_IS_ENOUGH.is_on() { 1 } else { ADVANCES };
    let mut ended = 0;
    for &(index, noted) in snapshot.holders.iter().rev().take(ENTRIES_PER_STEP.into()) {
        let now = holder_at(memory, snapshot.table, index)?;
        let is_over = now.nonce != noted.nonce
            || now.epoch >= noted.epoch.saturating_add(advances)
            || leased.is_fenced(region, noted.nonce);
        if !is_over {
            break;
        }
        ended += 1;
    }
    snapshot.holders.truncate(snapshot.holders.len() - ended);
    Ok(ended > 0)
}
