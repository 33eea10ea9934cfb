//! The new leaves, nodes and values of an operation, until a slot points to them or they are given back.
//!
//! Invariant: each of them is written whole before the CAS of the slot that makes it visible.

use super::Tree;
use super::layout::{Class, Content, Far, HEAD_AT, Head, Pointer, Slot, leaf_bytes, pointer_of};
use super::read::{LeafAt, Own};
use super::scan::Wanted;
use super::session::refused;
use super::units::Unit;
use crate::index::IndexError;
use crate::lease::LockWord;
use crate::members::all;
use crate::redo::Record;
use farside_remote::clock::Clock;
use farside_remote::fabric::Ran;
use farside_remote::{ChainBuf, Fabric, FabricError, Mode, Reply, Status, cas, read, write};
use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

/// A lane of a client: its buffers, and the memory that its operation has taken.
#[derive(Default)]
pub(in crate::index) struct Lane {
    pub(in crate::index) number: u16,
    pub(in crate::index) own: Own,
    pub(in crate::index) record: Record,
    pub(in crate::index) image: Vec<u8>,
    pub(in crate::index) leaf: Option<New>,
    pub(in crate::index) nodes: Vec<New>,
    /// Unit of the operation's value, if it lies apart.
    pub(in crate::index) apart: Option<New>,
}

/// A unit of an operation, and whether its state may have been written.
#[derive(Clone, Copy, Debug)]
pub(in crate::index) struct New {
    pub(in crate::index) unit: Unit,
    pub(in crate::index) was_written: bool,
}

/// A change that an operation makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::index) enum Put {
    /// Replaces the value, if the key has one.
    Always,
    /// Does nothing if the key has a value.
    IfAbsent,
}

/// Writes the value of an operation when it is about to be written.
pub(in crate::index) type Value<'a> = &'a dyn Fn(&mut Vec<u8>);

impl<F: Fabric + Clock> Tree<F> {
    /// Retires a dead leaf that this client has unlinked, and its value if that lies apart.
    pub(in crate::index) fn retire_leaf(&self, leaf: LeafAt, bytes: &[u8]) {
        self.units.retire(leaf.at, leaf.class, leaf.generation);
        self.retire_value(pointer_of(bytes));
    }

    /// Retires a value to which no leaf points any more.
    pub(in crate::index) fn retire_value(&self, pointer: Option<Pointer>) {
        if let Some((pointer, class)) =
            pointer.and_then(|at| Some((at, self.session.layout.class_of(&at).ok()?)))
        {
            self.units.retire(pointer.at, class, pointer.generation);
        }
    }

    /// Notes that a slot leads to the operation's new leaf, and to its new nodes if it is the slot of a node. Otherwise
    /// the operation has its nodes from a split that another client was faster with, and gives them back.
    pub(in crate::index) fn note_linked(&self, lane: &mut Lane, slot_at: Far, slot: Slot) {
        self.cache.borrow_mut().update(slot_at, slot);
        let count = if slot.is_leaf() { 0 } else { lane.nodes.len() };
        let nodes = lane.nodes.drain(..count);
        let new = lane.leaf.take().into_iter().chain(lane.apart.take()).chain(nodes);
        new.for_each(|new| self.units.linked(&new.unit));
    }

    /// Notes that a request after the change has failed. If it may still run, the client gives up, so that the memory
    /// that the request reaches is not reused before the client is fenced.
    pub(in crate::index) fn note_late(&self, error: &FabricError) {
        if error.ran() != Ran::No {
            self.session.give_up();
        }
    }

    /// CASes a slot. Returns the slot that was found if it is not `old`.
    pub(in crate::index) async fn swap_slot(
        &self,
        own: &mut Own,
        at: Far,
        old: Slot,
        new: Slot,
    ) -> Result<Result<(), Slot>, IndexError> {
        let layout = &self.session.layout;
        let (addr, table) = (layout.addr(at, 8)?, &layout.members[at.member()]);
        let [old, new] = [old, new].map(|slot| U64::new(slot.0));
        let mut chain = own.chain.begin(table.key());
        let found = chain.also(cas(Mode::Eq, addr, &old, &new));
        self.session.fabric.run(table.node, &chain, &mut own.reply).await.map_err(of_change)?;
        let found = own.reply.get(found).map_err(refused)?.get();
        Ok(if found == old.get() { Ok(()) } else { Err(Slot(found)) })
    }

    /// Takes the value, and the units of the operation's leaf and of a value that lies apart, unless it has them.
    pub(in crate::index) async fn take_leaf(
        &self,
        lane: &mut Lane,
        path: &[u8],
        value: Value<'_>,
    ) -> Result<(), IndexError> {
        if lane.leaf.is_none() {
            let class = self.session.layout.spec.leaf_class(path.len());
            let unit = self.units.take(&self.session, class).await?;
            lane.leaf = Some(New { unit, was_written: false });
        }
        self.take_value(lane, value).await
    }

    /// Takes the value, and its unit if it lies apart. Later attempts of the operation have the same unit and value.
    pub(in crate::index) async fn take_value(
        &self,
        lane: &mut Lane,
        value: Value<'_>,
    ) -> Result<(), IndexError> {
        if lane.apart.is_some() {
            return Ok(());
        }
        value(&mut lane.own.value);
        let (spec, len) = (&self.session.layout.spec, lane.own.value.len() as u32);
        if len > spec.inline_max {
            let unit = self.units.take(&self.session, spec.value_class(len)).await?;
            lane.apart = Some(New { unit, was_written: false });
        }
        Ok(())
    }

    /// Takes the units of new nodes of a class, so that the operation has `count` of them and no others.
    pub(in crate::index) async fn take_nodes(
        &self,
        lane: &mut Lane,
        class: Class,
        count: usize,
    ) -> Result<(), IndexError> {
        while lane.nodes.len() > count || lane.nodes.last().is_some_and(|new| new.unit.class != class) {
            let New { unit, was_written } = lane.nodes.pop().expect("there are more");
            self.units.give_back(&self.session, unit, was_written).await?;
        }
        while lane.nodes.len() < count {
            let unit = self.units.take(&self.session, class).await?;
            lane.nodes.push(New { unit, was_written: false });
        }
        Ok(())
    }

    /// Encodes the operation's leaf, whose value was taken.
    pub(in crate::index) fn encode_leaf(&self, lane: &mut Lane, rev_ptr: Far, path: &[u8]) {
        let unit = lane.leaf.expect("it was taken").unit;
        let content = (path, content_of(&lane.own, lane.apart));
        leaf_bytes(unit.class, (rev_ptr.0, unit.generation), content, LockWord::FREE, &mut lane.image);
    }

    /// Writes the operation's leaf, for the slot at `rev_ptr`.
    pub(in crate::index) async fn new_leaf(
        &self,
        lane: &mut Lane,
        rev_ptr: Far,
        path: &[u8],
        value: Value<'_>,
    ) -> Result<Unit, IndexError> {
        self.take_leaf(lane, path, value).await?;
        self.encode_leaf(lane, rev_ptr, path);
        let unit = lane.leaf.expect("it was taken").unit;
        let image = lane.image.clone();
        self.write_new(lane, vec![(unit.at, image)], None).await?;
        Ok(unit)
    }

    /// Writes new leaves and nodes, a value that lies apart, and the states of the operation's units. Marks the leaf
    /// `old`, which has this head, as replaced. All members' lists run at once.
    pub(in crate::index) async fn write_new(
        &self,
        lane: &mut Lane,
        writes: Vec<(Far, Vec<u8>)>,
        old: Option<(Far, Head)>,
    ) -> Result<(), IndexError> {
        self.write_and_read(lane, writes, old, &[]).await.map(drop)
    }

    /// Does the same, and reads something at the same time. Returns what was read, in order.
    pub(in crate::index) async fn write_and_read(
        &self,
        lane: &mut Lane,
        mut writes: Vec<(Far, Vec<u8>)>,
        old: Option<(Far, Head)>,
        reads: &[Wanted],
    ) -> Result<Vec<Vec<u8>>, IndexError> {
        if let Some(New { unit, was_written: false }) = lane.apart {
            writes.push((unit.at, lane.own.value.clone()));
        }
        for new in lane.leaf.iter_mut().chain(&mut lane.nodes).chain(&mut lane.apart) {
            if !std::mem::replace(&mut new.was_written, true) {
                writes.push((new.unit.state, new.unit.taken().as_bytes().to_vec()));
            }
        }
        let layout = &self.session.layout;
        let old_at = |member: &usize| old.filter(|(at, _)| at.member() == *member);
        let members = (0..layout.members.len()).filter(|member| {
            let are_there = |at: Far| at.member() == *member;
            writes.iter().any(|(at, _)| are_there(*at))
                || reads.iter().any(|read| are_there(read.at))
                || old_at(member).is_some()
        });
        let lists = members.map(|member| {
            let (table, writes) = (&layout.members[member], &writes);
            let marked = old_at(&member);
            let words = marked.map(|(_, head)| [head, head.replaced()].map(|head| U64::new(head.0)));
            async move {
                let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
                let mut chain = buffer.begin(table.key());
                for (at, bytes) in writes.iter().filter(|(at, _)| at.member() == member) {
                    chain.also(write(layout.addr(*at, bytes.len() as u64)?, bytes));
                }
                if let (Some((at, _)), Some([alive, replaced])) = (marked, &words) {
                    // If it fails, another writer has marked the leaf.
                    chain.also(cas(Mode::Eq, layout.addr(at.plus(HEAD_AT), 8)?, alive, replaced));
                }
                let mut outputs = Vec::new();
                for (index, wanted) in reads.iter().enumerate().filter(|(_, of)| of.at.member() == member) {
                    let addr = layout.addr(wanted.at, wanted.len)?;
                    outputs.push((index, chain.also(read(addr, wanted.len as u32))));
                }
                let ran = self.session.fabric.run(table.node, &chain, &mut reply).await;
                // If the list may run later, the units must not be written by another operation.
                ran.inspect_err(|error| self.note_late(error)).map_err(IndexError::of_read)?;
                match reply.verdict() {
                    Status::Ok => {}
                    status => return Err(refused(status)),
                }
                let read = outputs.into_iter().map(|(index, output)| {
                    reply.get(output).map(|bytes| (index, bytes.to_vec())).map_err(refused)
                });
                read.collect::<Result<Vec<_>, _>>()
            }
        });
        let mut read: Vec<(usize, Vec<u8>)> = Vec::new();
        for list in all(lists).await {
            read.extend(list?);
        }
        read.sort_unstable_by_key(|(index, _)| *index);
        Ok(read.into_iter().map(|(_, bytes)| bytes).collect())
    }

    /// Gives back the units that the operation has not used.
    pub(in crate::index) async fn give_back(&self, lane: &mut Lane) {
        let unused: Vec<New> =
            lane.leaf.take().into_iter().chain(lane.nodes.drain(..)).chain(lane.apart.take()).collect();
        for New { unit, was_written } in unused {
            let _else_heal_finds_it = self.units.give_back(&self.session, unit, was_written).await;
        }
    }
}

/// Returns the content of the operation's leaf: the value, or a pointer to it.
pub(in crate::index) fn content_of(own: &Own, apart: Option<New>) -> Content<'_> {
    match apart {
        Some(New { unit, .. }) => Content::Apart(Pointer::new(unit.at, unit.generation, &own.value)),
        None => Content::Value(&own.value),
    }
}

/// Returns the error of an operation whose failed request changes the index. Even if the request ran, its CAS may have
/// failed, so the outcome is unknown.
pub(in crate::index) fn of_change(error: FabricError) -> IndexError {
    IndexError::Fabric(error.map_ran(|ran| if ran == Ran::No { Ran::No } else { Ran::Unknown }))
}
