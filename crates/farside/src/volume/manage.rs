//! Creates, lists and drops volumes, and reports their state.
//!
//! Each group of replicas is a store, which `members` creates and drops as a whole. A volume with one group is that
//! store. A volume with several groups has a store for each ([`farside_systems::blocks::stripe`]), and its head
//! decides: the head is created last and dropped first. So a volume without a head does not exist, and whatever a dead
//! client has left of it is never used: its stores have a number of their own, so they do not stand in the way of
//! another volume of the same name. [`Pool::drop_volume`] removes them.
//!
//! A client that removes what another one has left may err: the other one may be slow, and create the head later. So a
//! creation ends with a look at all stores. If one is missing, the volume is dropped. A client that opens such a volume
//! before that finds that a store is missing, and does not use the volume either.

use crate::error::Error;
use crate::pool::Pool;
use farside_node::catalog::Division;
use farside_remote::arena::SEGMENT_SIZE;
use farside_remote::control::Store;
use farside_remote::fabric::Ran;
use farside_remote::{FabricError, NodeId};
use farside_systems::blocks::abd_lock::layout::LEASES;
use farside_systems::blocks::prism_rs;
use farside_systems::blocks::prism_rs::replace::{ReplaceOptions, Replaced, replace};
use farside_systems::blocks::stripe::{NAME_MAX, STRIPES_MAX, Shape, Stripe};
use farside_systems::blocks::{BLOCK_MAX, BLOCK_MIN, Blocks, WriterIds};
use farside_systems::kv::KvError;
use farside_systems::members::{self, Placement, REPLICAS_MAX, WithoutFirst};
use farside_systems::registry::{AnyBlocks, Registered, named, names};
use farside_systems::store::{Loss, StoreError};
use farside_systems::system::{Family, Options, Sizing, SizingError};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

/// Length of a block in bytes, unless it is given.
const BLOCK: u32 = 4096;
/// Size of the largest volume, which no nodes can hold. Sums of such sizes do not overflow.
const SIZE_MAX: u64 = 1 << 58;
/// Memory beyond that for all blocks: for writes in flight, and for what they replace.
const SLACK: u64 = 16 << 20;

/// Description of a volume to create, for [`Pool::create_volume`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewVolume {
    /// Name of the volume: 1 to 50 letters, digits, `-`, `_` or `.`.
    pub name: String,
    /// Size in bytes. The volume gets as many whole blocks as it takes.
    pub size: u64,
    /// Length of a block in bytes: a multiple of 512, at most 32 KiB.
    pub block: u32,
    /// Number of replicas of each block: 1, 3 or 5. The volume survives the loss of 0, 1 or 2 of them.
    pub replicas: usize,
    /// Number of groups of replicas over which the blocks are striped. If absent, as many as the pool has nodes for.
    pub groups: Option<usize>,
    /// Bytes of memory on each node that holds a replica. If absent, enough for all blocks. With less, not all blocks
    /// can be written.
    pub quota: Option<u64>,
    /// Kind of the stores.
    pub kind: String,
    /// Length of the leases of clients, for a kind of stores with locks: the locks of a client that died or was stopped
    /// for longer are taken from it. If absent, the stores have no leases.
    pub leases: Option<Duration>,
}

impl NewVolume {
    /// A volume of `size` bytes, in blocks of 4 KiB with three replicas each.
    pub fn new(name: impl Into<String>, size: u64) -> NewVolume {
        let (kind, groups, quota, leases) = (prism_rs::KIND.to_owned(), None, None, None);
        NewVolume { name: name.into(), size, block: BLOCK, replicas: 3, groups, quota, kind, leases }
    }
}

/// Description of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeInfo {
    /// Name of the volume.
    pub name: String,
    /// Kind of its stores.
    pub kind: String,
    /// Size in bytes; 0 if unknown.
    pub size: u64,
    /// Length of a block in bytes.
    pub block: u32,
    /// Number of replicas of each block.
    pub replicas: usize,
    /// Number of groups of replicas.
    pub groups: usize,
    /// Bytes of memory on each node that holds a replica.
    pub quota: u64,
    /// Whether all of its stores were found.
    pub state: VolumeState,
}

/// Whether all stores of a volume were found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VolumeState {
    /// All stores were found.
    Whole,
    /// This number of stores was not found at the nodes that answered.
    Lacks(usize),
    /// The volume does not exist. A client that created or dropped it has left some stores.
    Leftover,
}

/// State of a volume, for [`Pool::volume_stat`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeStat {
    /// Size in bytes.
    pub size: u64,
    /// Length of a block in bytes.
    pub block: u32,
    /// Kind of the stores.
    pub kind: String,
    /// Groups of replicas, by index.
    pub groups: Vec<GroupStat>,
}

/// State of a group of replicas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupStat {
    /// Name of the group's store.
    pub store: String,
    /// Number of the group's configuration, which rises when a replica is replaced.
    pub configuration: u64,
    /// Number of blocks.
    pub blocks: u64,
    /// Use of the writer ids; `None` if the kind of the volume does not count them. Or the reason why it is unknown.
    pub writer_ids: Result<Option<WriterIds>, String>,
    /// Replicas, by index.
    pub replicas: Vec<ReplicaStat>,
}

/// State of a replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaStat {
    /// Url of the node that holds the replica, or probably does.
    pub url: String,
    /// Incarnation of the memory with which the replica was created; 0 if the group has one replica.
    pub incarnation: u64,
    /// Blocks that are written, and memory left; else the reason why the replica does not serve.
    pub memory: Result<ReplicaMemory, String>,
}

/// Use of a replica's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaMemory {
    /// Number of blocks that were written at least once. Not counted, and 0, if the kind of the volume keeps all blocks
    /// in its table.
    pub blocks_written: u64,
    /// Number of further blocks that can be written. Retired buffers count once the node has freed them. Of no meaning
    /// if the kind of the volume keeps all blocks in its table.
    pub buffers_free: u64,
    /// Number of buffers of overwritten blocks that the node has not freed yet.
    pub buffers_retired: u64,
    /// Number of leaked buffers that scans of the node's stores have found since its process started.
    pub buffers_leaked: u64,
}

/// What [`Pool::drop_volume`] could not do.
#[derive(Debug, Default)]
pub struct DroppedVolume {
    /// Urls of the nodes that hold a part and did not respond: they free it when a client next opens, creates or drops
    /// a store of its name.
    pub silent: Vec<String>,
    /// Names of the stores that were not dropped, with the reasons. Drop the volume again once they are removed.
    pub left: Vec<(String, Error)>,
}

impl Pool {
    /// Creates a volume. Afterwards either all of its stores exist or it does not.
    ///
    /// # Errors
    /// [`Error::Volume`] if the description is impossible, or the name is taken. Otherwise a node cannot be reached or
    /// has not enough unassigned memory. No volume was created; but if [`Error::ran`] is
    /// [`Ran::Unknown`](crate::Ran::Unknown), it may have been: check [`Pool::volumes`].
    pub fn create_volume(&self, new: &NewVolume) -> Result<VolumeInfo, Error> {
        let plan = Plan::of(new, self.nodes().len())?;
        if self.stores()?.iter().any(|store| store.name == new.name) {
            return Err(Error::Volume(format!(
                "there is a store or volume '{}' already: drop it first, or choose another name",
                new.name
            )));
        }
        let volume = random();
        let count = plan.groups as u32;
        let stripes: Vec<Stripe> = (0..count).map(|index| Stripe { volume, index, count }).collect();
        let (head, others) = stripes.split_first().expect("a plan has a group");
        let names: Vec<String> = others.iter().map(|stripe| stripe.store_name(&new.name)).collect();
        // The head is last: it decides.
        for stripe in others.iter().chain([head]) {
            let Err(error) = self.create_part(new, &plan, *stripe) else { continue };
            if stripe.index > 0 || error.ran() == Ran::No {
                self.drop_parts(&names);
            }
            let is_refused = matches!(error, Error::Fabric(FabricError::Refused(_)));
            return Err(self.shortage(new, &plan).filter(|_| is_refused).unwrap_or(error));
        }
        if let Some(missing) = self.missing(&names)? {
            self.drop_parts(std::slice::from_ref(&new.name));
            self.drop_parts(&names);
            return Err(Error::Volume(format!(
                "volume '{}' was not created: another client has dropped its store '{missing}' meanwhile; retry",
                new.name
            )));
        }
        Ok(VolumeInfo {
            name: new.name.clone(),
            kind: new.kind.clone(),
            size: plan.blocks * u64::from(new.block),
            block: new.block,
            replicas: new.replicas,
            groups: plan.groups,
            quota: plan.quota,
            state: VolumeState::Whole,
        })
    }

    fn create_part(&self, new: &NewVolume, plan: &Plan, stripe: Stripe) -> Result<(), Error> {
        let sizing = plan.sizing(new, stripe);
        let (name, kind, quota) = (stripe.store_name(&new.name), new.kind.clone(), plan.quota);
        let part = members::New { name, kind, sizing, quota, members: new.replicas };
        let at = Placement { name: &new.name, skip: stripe.index as usize * new.replicas };
        let attempt = [random(), random()];
        self.over_all(async |endpoint| {
            members::create_at(endpoint, endpoint.nodes(), &part, at, attempt).await.map(drop)
        })
    }

    /// Returns the error that a node has too little memory for a volume, if one has.
    fn shortage(&self, new: &NewVolume, plan: &Plan) -> Option<Error> {
        const MIB: u64 = 1 << 20;
        let needed = plan.quota + Division::reserve_of(plan.quota / SEGMENT_SIZE) * SEGMENT_SIZE;
        let infos = self.nodes().filter_map(|node| Some((node.info().ok()?.unassigned_bytes, node)));
        let (free, node) = infos.min_by_key(|(free, _)| *free).filter(|(free, _)| *free < needed)?;
        let missing = (needed - free).div_ceil(MIB);
        Some(Error::Volume(format!(
            "no volume '{}': it needs {} MiB on each of {} nodes, and {} has {} MiB unassigned: serve {missing} MiB \
             more --memory there ('farside up' gives half of its memory to the store 'default': give it {} MiB more), \
             drop a store there, or give it a smaller --size or --quota",
            new.name,
            needed.div_ceil(MIB),
            new.replicas * plan.groups,
            node.url(),
            free / MIB,
            2 * missing
        )))
    }

    /// Drops stores that are of no use. What cannot be dropped now is dropped with the next volume of the name, by a
    /// user.
    fn drop_parts(&self, stores: &[String]) {
        for store in stores {
            let _left_for_the_user = self.drop_without(store, WithoutFirst::Refuse);
        }
    }

    /// Returns the first of these stores that no node has.
    fn missing<'a>(&self, stores: &'a [String]) -> Result<Option<&'a String>, Error> {
        for store in stores {
            let opened = self.over_all(async |endpoint| {
                match members::open(endpoint, endpoint.nodes(), store).await {
                    Err(StoreError::Gone(_)) => Ok(false),
                    // A node that does not answer now is no reason to drop what was just created.
                    _ => Ok(true),
                }
            })?;
            if !opened {
                return Ok(Some(store));
            }
        }
        Ok(None)
    }

    /// Lists all volumes, sorted by name, and what is left of volumes that do not exist.
    ///
    /// # Errors
    /// No node has responded; nothing was changed.
    pub fn volumes(&self) -> Result<Vec<VolumeInfo>, Error> {
        let (stores, is_complete) = self.stores_found()?;
        let parts: Vec<(&Store, Shape)> =
            stores.iter().filter_map(|store| Some((store, block_store(store)?))).collect();
        let number = |shape: &Shape| shape.stripe.map(|stripe| stripe.volume);
        let is_head = |shape: &Shape| shape.stripe.is_none_or(|stripe| stripe.index == 0);
        let with_head: BTreeSet<u64> =
            parts.iter().filter(|(_, shape)| is_head(shape)).filter_map(|(_, shape)| number(shape)).collect();
        let mut seen = BTreeSet::new();
        let mut volumes = Vec::new();
        for &(store, shape) in &parts {
            let is_left =
                !is_head(&shape) && number(&shape).is_some_and(|number| !with_head.contains(&number));
            // Of what is left of a volume, one store is shown.
            if !(is_head(&shape) || is_left && number(&shape).is_some_and(|number| seen.insert(number))) {
                continue;
            }
            let of_volume = |other: &Shape| number(other).is_some() && number(other) == number(&shape);
            let found: Vec<&Shape> =
                parts.iter().map(|(_, other)| other).filter(|other| of_volume(other)).collect();
            let groups = shape.stripe.map_or(1, |stripe| stripe.count as usize);
            let state = match (is_left, groups.saturating_sub(found.len().max(1))) {
                (true, _) if is_complete => VolumeState::Leftover,
                // The head may be at the nodes that did not respond.
                (true, missing) => VolumeState::Lacks(missing),
                (false, 0) => VolumeState::Whole,
                (false, missing) => VolumeState::Lacks(missing),
            };
            let size = match shape.stripe {
                None => Shape::bytes([&shape]),
                Some(_) if state == VolumeState::Whole => Shape::bytes(found),
                Some(_) => 0,
            };
            let name = shape.stripe.map_or(Some(&store.name[..]), |stripe| stripe.volume_name(&store.name));
            volumes.push(VolumeInfo {
                name: name.unwrap_or(&store.name).to_owned(),
                kind: store.kind.clone(),
                size,
                block: shape.block,
                replicas: store.membership.as_ref().map_or(1, |of| of.members.len()),
                groups,
                quota: store.quota,
                state,
            });
        }
        volumes.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(volumes)
    }

    /// Returns the state of each replica of a volume.
    ///
    /// # Errors
    /// The volume does not exist, or no replica of a group has answered; nothing was changed.
    pub fn volume_stat(&self, name: &str) -> Result<VolumeStat, Error> {
        let mut groups = Vec::new();
        let (mut size, mut head): (u64, Option<Shape>) = (0, None);
        let mut kind = String::new();
        let mut names = vec![name.to_owned()];
        let mut next = 0;
        while let Some(store) = names.get(next).cloned() {
            let opened =
                self.over_all(async |endpoint| members::open(endpoint, endpoint.nodes(), &store).await);
            let members = opened.map_err(|error| self.absent_volume(name, error))?;
            let shape = shape_of(members.store())?;
            if next == 0 {
                let others =
                    shape.stripe.into_iter().flat_map(|of| (1..of.count).map(move |index| (of, index)));
                names.extend(others.map(|(of, index)| Stripe { index, ..of }.store_name(name)));
                kind.clone_from(&members.store().kind);
                head = Some(shape);
            }
            size = size.saturating_add(Shape::bytes([&shape]));
            let incarnations = members.store().membership.as_ref();
            let incarnations: Vec<u64> = incarnations
                .map_or_else(|| vec![0], |of| of.members.iter().map(|id| id.incarnation).collect());
            let mut replicas = Vec::new();
            for (member, incarnation) in members.list().iter().zip(incarnations) {
                let memory = match &member.store {
                    Err(StoreError::MemoryLost { loss: Loss::Replaceable, .. }) => {
                        Err("its node has lost its memory: 'farside heal' replaces it".to_owned())
                    }
                    Err(error) => Err(error.to_string()),
                    Ok(_) => {
                        self.replica_memory(member.node, &store, shape).map_err(|error| error.to_string())
                    }
                };
                replicas.push(ReplicaStat { url: self.url_of(member.node), incarnation, memory });
            }
            let writer_ids = self.over_all(async |endpoint| {
                let options = Options { entropy: random(), ..Options::default() };
                let mut client = AnyBlocks::of(Rc::clone(endpoint), &members, &options).await?;
                Ok(client.writer_ids().await)
            });
            let writer_ids = writer_ids.map_err(|error| error.to_string());
            let writer_ids = writer_ids.and_then(|ids| ids.map_err(|error| error.to_string()));
            let configuration = members.configuration();
            groups.push(GroupStat { store, configuration, blocks: shape.blocks, writer_ids, replicas });
            next += 1;
        }
        let block = head.expect("the head was opened").block;
        Ok(VolumeStat { size, block, kind, groups })
    }

    /// Returns the error of an operation on the volume called `name`, in words for volumes if no node has it.
    pub(super) fn absent_volume(&self, name: &str, error: Error) -> Error {
        let is_gone = match &error {
            Error::Fabric(FabricError::Refused(_)) => true,
            Error::Kv(error) => matches!(error, KvError::Store(StoreError::Gone(_))),
            _ => false,
        };
        match self.stores() {
            Ok(stores) if is_gone && stores.iter().all(|store| store.name != name) => Error::Volume(format!(
                "there is no volume '{name}' in the pool: list the volumes with 'farside volume list', or create it \
                 with 'farside volume create {name} --size 1GiB'"
            )),
            _ => error,
        }
    }

    /// Replaces a replica of a volume by the node at `by`, which may be another node, or the one that holds the replica
    /// and has lost its memory. Clients use the volume meanwhile, but wait for a short time at the end. If `by` is
    /// not in the pool, clients need it in theirs from then on. Copies at most `rate` bytes a second, if that is given.
    /// Calls `progress` with the number of blocks that were compared, and with that of all blocks.
    ///
    /// # Errors
    /// The volume is as safe as before: it or the replica does not exist, too few replicas or the node do not respond,
    /// or the node has not enough unassigned memory. An interrupted replacement is completed by [`Pool::heal`].
    pub fn replace_replica(
        &self,
        name: &str,
        group: usize,
        index: usize,
        by: &Pool,
        rate: Option<u64>,
        mut progress: impl FnMut(u64, u64),
    ) -> Result<Replaced, Error> {
        let node = by.url().to_owned();
        let pool = match self.nodes().any(|node| node.url() == by.url()) {
            true => self.clone(),
            false => Pool::joined(&[self.clone(), by.clone()]),
        };
        let Some(by) = pool.nodes().position(|other| other.url() == node) else {
            return Err(Error::Volume(format!(
                "'{node}' is not one node: name the one that is to hold the replica"
            )));
        };
        let head = pool.over_all(async |endpoint| members::open(endpoint, endpoint.nodes(), name).await);
        let shape = shape_of(head.map_err(|error| self.absent_volume(name, error))?.store())?;
        let groups = shape.stripe.map_or(1, |stripe| stripe.count as usize);
        let store = match shape.stripe {
            _ if group >= groups => {
                return Err(Error::Volume(format!(
                    "volume '{name}' has no group {group}: give a number below {groups}"
                )));
            }
            Some(stripe) => Stripe { index: group as u32, ..stripe }.store_name(name),
            None => name.to_owned(),
        };
        pool.over_all(async |endpoint| {
            let members = members::open(endpoint, endpoint.nodes(), &store).await?;
            let (kind, replicas) = (&members.store().kind, members.list().len());
            if *kind != prism_rs::KIND || replicas == 1 {
                return Err(StoreError::Gone(format!(
                    "the replicas of store '{store}' cannot be replaced: it is {kind} with {replicas} replicas"
                )));
            }
            if index >= replicas {
                return Err(StoreError::Gone(format!(
                    "store '{store}' has no replica {index}: give a number below {replicas}"
                )));
            }
            let options = ReplaceOptions { entropy: random(), bytes_per_second: rate, progress: &mut progress };
            replace(endpoint, &members, index, NodeId(by as u32), options).await
        })
    }

    fn replica_memory(&self, node: NodeId, store: &str, shape: Shape) -> Result<ReplicaMemory, Error> {
        let node = self.nodes().nth(node.0 as usize).expect("a member's node is in the pool");
        let stat = node.stat(store)?;
        Ok(ReplicaMemory {
            blocks_written: stat.live_buffers,
            buffers_free: Division::buffers_left(&stat, shape.block as usize),
            buffers_retired: stat.retired_buffers,
            buffers_leaked: node.info()?.scanned_buffers,
        })
    }

    fn url_of(&self, node: NodeId) -> String {
        self.nodes().nth(node.0 as usize).map_or_else(String::new, |node| node.url().to_owned())
    }

    /// Drops a volume with all of its blocks, and what dead clients have left of volumes of this name.
    ///
    /// # Errors
    /// The volume does not exist, the node that decides on its head does not respond or is not in the pool, or the
    /// token has no right to drop it: nothing was changed. If [`Error::ran`] is [`Ran::Unknown`](crate::Ran::Unknown),
    /// it may have been dropped.
    pub fn drop_volume(&self, name: &str) -> Result<DroppedVolume, Error> {
        self.drop_volume_without(name, WithoutFirst::Refuse)
    }

    /// Drops a volume as [`Pool::drop_volume`] does, although nodes that decide are gone for good.
    ///
    /// # Errors
    /// As [`Pool::drop_volume`], except that these nodes need not respond.
    pub fn forget_volume(&self, name: &str) -> Result<DroppedVolume, Error> {
        self.drop_volume_without(name, WithoutFirst::Forget)
    }

    fn drop_volume_without(&self, name: &str, first: WithoutFirst) -> Result<DroppedVolume, Error> {
        let stores = self.stores()?;
        let head = stores.iter().find(|store| store.name == name);
        let head_shape = head.map(shape_of).transpose()?;
        let is_part = |store: &&Store| {
            let stripe = block_store(store).and_then(|shape| shape.stripe);
            stripe.is_some_and(|stripe| stripe.index > 0 && stripe.volume_name(&store.name) == Some(name))
        };
        let mut parts: BTreeSet<String> =
            stores.iter().filter(is_part).map(|store| store.name.clone()).collect();
        let is_listed = parts.clone();
        if let Some(stripe) = head_shape.and_then(|shape| shape.stripe) {
            parts.extend((1..stripe.count).map(|index| Stripe { index, ..stripe }.store_name(name)));
        }
        let mut dropped = DroppedVolume::default();
        // The head is first, also if it was not listed: it may be at nodes that did not respond.
        match self.drop_without(name, first) {
            Ok(silent) => dropped.silent = silent,
            // All nodes have responded, and none has it.
            Err(Error::Fabric(FabricError::Refused(_))) if head.is_none() && !parts.is_empty() => {}
            // The user says that its nodes are gone for good.
            Err(_) if first == WithoutFirst::Forget && head.is_none() && !parts.is_empty() => {}
            Err(error) => return Err(self.absent_volume(name, error)),
        }
        for part in parts {
            match self.drop_without(&part, first) {
                Ok(silent) => dropped.silent.extend(silent),
                // It was dropped before.
                Err(Error::Fabric(FabricError::Refused(_))) if !is_listed.contains(&part) => {}
                Err(error) => dropped.left.push((part, error)),
            }
        }
        dropped.silent.sort();
        dropped.silent.dedup();
        Ok(dropped)
    }
}

/// Sizes of a volume's parts.
struct Plan {
    blocks: u64,
    groups: usize,
    /// Memory of each replica, in bytes.
    quota: u64,
}

impl Plan {
    /// # Errors
    /// No such volume is possible in a pool of `nodes` nodes.
    fn of(new: &NewVolume, nodes: usize) -> Result<Plan, Error> {
        let wrong = |reason: String| Err(Error::Volume(format!("no volume '{}': {reason}", new.name)));
        let NewVolume { name, size, block, replicas, groups, quota, kind, leases } = new;
        if name.len() > NAME_MAX {
            return wrong(format!("the name has {} characters: give at most {NAME_MAX}", name.len()));
        }
        let block_len = *block as usize;
        if !block_len.is_multiple_of(BLOCK_MIN) || !(BLOCK_MIN..=BLOCK_MAX).contains(&block_len) {
            return wrong(format!(
                "blocks of {block} bytes are not possible: give a multiple of {BLOCK_MIN} up to {BLOCK_MAX}"
            ));
        }
        if *replicas % 2 == 0 || *replicas > REPLICAS_MAX {
            return wrong(format!(
                "{replicas} replicas are not possible: give 3, which survive the loss of one, or 1 or {REPLICAS_MAX}"
            ));
        }
        if nodes < *replicas {
            return wrong(format!(
                "each of {replicas} replicas needs a node of its own, and the pool has {nodes}: name more nodes with \
                 --pool URL,URL,URL ('farside up --nodes {replicas}' starts some), or give fewer --replicas"
            ));
        }
        let blocks = size.div_ceil(u64::from(*block));
        if blocks == 0 {
            return wrong("it has no bytes: give a --size such as 1GiB".into());
        }
        let most = (nodes / replicas).min(STRIPES_MAX as usize);
        let groups = groups.unwrap_or(most.min(usize::try_from(blocks).unwrap_or(most)));
        if groups == 0 || groups > most || groups as u64 > blocks {
            return wrong(format!(
                "{groups} groups of {replicas} replicas are not possible on {nodes} nodes with {blocks} blocks: give 1 \
                 to {}",
                most.min(usize::try_from(blocks).unwrap_or(most))
            ));
        }
        let Some(Registered { family: Family::Blocks, for_tests: false, footprint, parameters, .. }) =
            named(kind)
        else {
            return wrong(format!(
                "'{kind}' is no kind of block store: give one of {}",
                names(Family::Blocks)
            ));
        };
        if *size > SIZE_MAX {
            return wrong(format!("no node can hold {size} bytes: give a smaller --size"));
        }
        let mut plan = Plan { blocks, groups, quota: quota.unwrap_or(0) };
        let stripe = Stripe { volume: 0, index: 0, count: groups as u32 };
        let sizing = plan.sizing(new, stripe);
        if Shape::of(&parameters(&sizing)).is_none_or(|shape| shape.stripe != sizing.stripe) {
            return wrong(format!(
                "{kind} stores cannot be parts of a volume: give --groups 1, or another --kind"
            ));
        }
        if leases.is_some() && parameters(&sizing) == parameters(&Sizing { lease: None, ..sizing }) {
            return wrong(format!("{kind} stores have no leases: give no --leases, or another --kind"));
        }
        if leases.is_some_and(|leases| !LEASES.contains(&leases)) {
            return wrong(format!(
                "leases of {:?} are not possible: give {:?} to {:?}",
                leases.unwrap_or_default(),
                LEASES.start(),
                LEASES.end()
            ));
        }
        let needed = footprint(&sizing);
        if let Err(SizingError::Value(most)) = needed {
            return wrong(format!(
                "blocks of {block} bytes are not possible in {kind} stores like this one: give at most {most}"
            ));
        }
        let Ok(needed) = needed else {
            return wrong(format!("no node can hold {size} bytes: give a smaller --size"));
        };
        if quota.is_none() {
            let items = u128::from(stripe.share(blocks)) * u128::from(needed.item_bytes);
            let bytes = u128::from(needed.table_bytes) + items + items / 16 + u128::from(SLACK);
            let Ok(bytes) = u64::try_from(bytes.next_multiple_of(1 << 20)) else {
                return wrong(format!("no node can hold {size} bytes: give a smaller --size"));
            };
            plan.quota = bytes;
        }
        Ok(plan)
    }

    fn sizing(&self, new: &NewVolume, stripe: Stripe) -> Sizing {
        Sizing {
            items: Some(stripe.share(self.blocks)),
            value_len: new.block as usize,
            stripe: (self.groups > 1).then_some(stripe),
            lease: new.leases,
            ..Sizing::default()
        }
    }
}

/// Returns the shape of a block store; `None` if the store is of another family or damaged.
#[doc(hidden)]
pub fn block_store(store: &Store) -> Option<Shape> {
    let is_blocks = named(&store.kind).is_some_and(|system| system.family == Family::Blocks);
    Shape::of(&store.parameters).filter(|_| is_blocks)
}

/// Returns the shape of a block store.
///
/// # Errors
/// The store is of another family, or its description is damaged.
pub(super) fn shape_of(store: &Store) -> Result<Shape, Error> {
    let name = &store.name;
    match (block_store(store), named(&store.kind)) {
        (Some(shape), _) => Ok(shape),
        (None, Some(system)) if system.family != Family::Blocks => Err(Error::Volume(format!(
            "store '{name}' is {} and not a volume: name another, or use 'farside store'",
            system.family.noun()
        ))),
        _ => Err(Error::Volume(format!(
            "the description of store '{name}' is not that of a volume: use the release that created it"
        ))),
    }
}

fn random() -> u64 {
    getrandom::u64().expect("the system has random bytes: numbers of volumes must differ")
}
