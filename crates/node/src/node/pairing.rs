//! The memory's side of the pairing of logs with memories: what a node does at its start, before it serves any store.
//!
//! Invariant: while a store's contents are incomplete, the catalog's record says so.

use super::jobs::grant_step;
use super::{Node, NodeMemory};
use crate::catalog::{Division, Entry};
use crate::log::pairing::{Paired, PairedState};
use crate::rebuild::segments_of;
use crate::restart::{self, Recorded};
use farside_remote::arena::Arena;
use farside_remote::control::Store;

impl<M: NodeMemory> Node<M> {
    /// Records a store's relation to its log.
    ///
    /// # Errors
    /// There is no such store, or the catalog has no space for the record.
    pub fn pair(&mut self, memory: &M, name: &str, paired: Paired) -> Result<Result<(), String>, M::Wait> {
        let store = match self.catalog.get(name) {
            Ok(entry) => entry.store.clone(),
            Err(reason) => return Ok(Err(reason)),
        };
        self.record_pairs(memory, &[(store, paired)])
    }

    /// Records that the stores are served without their logs.
    ///
    /// # Errors
    /// A store's contents are incomplete, or the catalog has no space for the record.
    pub fn leave_logs(&mut self, memory: &M) -> Result<Result<(), String>, M::Wait> {
        let mut left = Vec::new();
        for entry in self.catalog.iter() {
            match entry.paired {
                Some(Paired { state: PairedState::Replaying, .. }) => {
                    return Ok(Err(incomplete(&entry.store.name)));
                }
                Some(Paired { number, state: PairedState::Kept }) => {
                    left.push((entry.store.clone(), Paired { number, state: PairedState::Ahead }));
                }
                Some(Paired { state: PairedState::Ahead, .. }) | None => {}
            }
        }
        if left.is_empty() {
            return Ok(Ok(()));
        }
        self.record_pairs(memory, &left)
    }

    /// Discards the contents of a store, so that its log can be replayed into it. The store gets another key.
    ///
    /// # Errors
    /// There is no such store, it is being rebuilt, or the catalog has no space for the record.
    pub fn empty(&mut self, memory: &M, name: &str, secret: u64) -> Result<Result<(), String>, M::Wait> {
        let checked = self.catalog.get(name).and_then(|entry| {
            let store = Store { secret: secret.max(1), ..entry.store.clone() };
            if store.former.is_some() {
                return Err(format!("store '{name}' is being rebuilt, and cannot be emptied for its log"));
            }
            let division = match self.catalog.kind(&store.kind)?.is_table_only() {
                true => Division::of_table(store.quota, store.table_len)?,
                false => Division::of(store.quota, store.table_len)?,
            };
            Ok((self.catalog.serve(&store)?, store, division))
        });
        let (service, store, division) = match checked {
            Ok(checked) => checked,
            Err(reason) => return Ok(Err(reason)),
        };
        let replaying = Paired { number: 0, state: PairedState::Replaying };
        if let Err(reason) = self.record_pairs(memory, &[(store.clone(), replaying)])? {
            return Ok(Err(reason));
        }
        let region = store.region;
        let Some(entry) = self.catalog.by_region_mut(region) else { return Ok(Ok(())) };
        let mut segments = segments_of(memory.geometry(), store.table_at, store.table_len);
        let others = entry.segments.iter().filter(|index| !segments.contains(index));
        let others: Vec<u32> = others.copied().collect();
        segments.extend(others);
        let mut emptied = Entry::new(store, service, segments);
        (emptied.fenced, emptied.register) = (entry.fenced.clone(), entry.register.clone());
        emptied.paired = Some(replaying);
        *entry = emptied;
        Arena::of(memory).clear_region(region)?;
        for &index in &entry.segments {
            memory.discard(index)?;
        }
        let mut granted = 0;
        while grant_step(memory, entry, &division, &mut granted)?.is_some() {}
        Ok(Ok(()))
    }

    /// Writes a record of the catalog in which these stores have these relations to their logs.
    fn record_pairs(&mut self, memory: &M, pairs: &[(Store, Paired)]) -> Result<Result<(), String>, M::Wait> {
        let of = |region| pairs.iter().find(|(store, _)| store.region == region);
        let stores = self.catalog.iter().map(|entry| match of(entry.store.region) {
            Some((store, paired)) => Recorded { store, paired: Some(*paired), ..Recorded::from(entry) },
            None => Recorded::from(entry),
        });
        let record = match restart::record(self.catalog_sequence + 1, &stores.collect::<Vec<_>>()) {
            Ok(record) => record,
            Err(reason) => return Ok(Err(reason)),
        };
        self.write_catalog(memory, &record)?;
        self.catalog_sequence += 1;
        for (store, paired) in pairs {
            if let Some(entry) = self.catalog.by_region_mut(store.region) {
                entry.paired = Some(*paired);
            }
        }
        Ok(Ok(()))
    }
}

/// Error message for a store whose replay was cut short and whose log is missing.
pub(crate) fn incomplete(name: &str) -> String {
    format!(
        "the contents of store '{name}' are incomplete, since its log was being replayed when the node ended: start \
         with its --log-dir, or serve another --memory-file"
    )
}
