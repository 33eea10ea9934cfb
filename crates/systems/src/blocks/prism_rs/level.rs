//! Brings the newest blocks, and the highest writer id, of some replicas to others.
//!
//! The registers are read in batches, and their tags are compared. Only a block whose newest tag is at too few targets
//! is read and installed, by the same chains as a client's. Installing compares tags, so a copy never replaces a newer
//! block, and may be repeated. The highest writer id of the sources becomes that of the targets.
//!
//! Invariant: a batch is done only when its registers were read at enough sources, and when each block found there is
//! at enough targets. A site that fails no longer counts, and its batch is done again without it.

use super::layout::{REGISTER_SIZE, Register, Spec, Tag};
use super::mutants;
use super::replica::{Access, table_of};
use super::{Table, claim, install, read_block};
use crate::blocks::BlocksError;
use crate::members::all;
use crate::store::{Members, StoreError};
use farside_remote::arena::class::Class;
use farside_remote::clock::Clock;
use farside_remote::{Addr, ChainBuf, Fabric, NodeId, Out, Reply, read};
use std::time::Duration;
use zerocopy::FromBytes;
use zerocopy::big_endian::U64;

/// Number of bytes that one chain reads of a table.
const READ_BYTES: u64 = 32 << 10;
/// Number of such chains at a site at the same time, if clients wait until a table is read.
pub(super) const READS: u64 = 8;
/// Number of blocks that are copied at the same time.
const COPIES: usize = 32;
const ID_SIZE: u64 = size_of::<U64>() as u64;

/// A replica that takes part, with a key.
pub(super) struct Site {
    pub(super) node: NodeId,
    /// Whether its blocks are brought to others.
    is_source: bool,
    /// Whether blocks of others are brought to it.
    is_target: bool,
    table: Table,
    failure: Option<BlocksError>,
    chain: ChainBuf,
    reply: Reply,
}

impl Site {
    /// Creates the access to the replica that `part` describes, of the store that `members` describe.
    ///
    /// # Errors
    /// The fabric lacks a capability that PRISM-RS needs, or the description is impossible.
    pub(super) fn new<F: Fabric>(fabric: &F, members: &Members, part: &Members) -> Result<Site, StoreError> {
        let (node, table) = table_of(fabric, members, part)?;
        let (chain, reply) = (ChainBuf::new(), Reply::new());
        Ok(Site { node, is_source: false, is_target: false, table, failure: None, chain, reply })
    }

    pub(super) fn with_roles(self, is_source: bool, is_target: bool) -> Site {
        Site { is_source, is_target, ..self }
    }

    fn access(&mut self) -> Access<'_> {
        Access { node: self.node, table: self.table, chain: &mut self.chain, reply: &mut self.reply }
    }
}

/// Numbers of sources that must be read, and of targets that must have what was found.
#[derive(Clone, Copy)]
pub(super) struct Needed {
    pub(super) sources: usize,
    pub(super) targets: usize,
}

/// Number of blocks that were copied, and of their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copied {
    /// Number of blocks, counted once for each replica that got them.
    pub blocks: u64,
    /// Bytes of these blocks.
    pub bytes: u64,
}

/// Pace of copying.
pub(super) struct Pace<'a> {
    /// Number of chains that read the table of a site at the same time: a batch.
    pub(super) reads: u64,
    /// Maximum number of bytes per second; `None` for no limit.
    pub(super) bytes_per_second: Option<u64>,
    /// Called with the number of blocks that were compared so far, and the number of all blocks.
    pub(super) progress: &'a mut dyn FnMut(u64, u64),
}

/// Brings what the sources among `sites` have to the targets among them. `early` replaces the tags of the sources,
/// which only a mutant does.
///
/// # Errors
/// Too few sources or targets are left: the error of the last one that failed. What was copied stays.
pub(super) async fn level<F: Fabric + Clock>(
    fabric: &F,
    sites: &mut [Site],
    needed: Needed,
    pace: &mut Pace<'_>,
    early: Option<&[Tag]>,
) -> Result<Copied, BlocksError> {
    let Some(spec) = sites.first().map(|site| site.table.spec) else {
        return Err(BlocksError::Damaged("a replacement without replicas"));
    };
    if !mutants::IDS_FORGOTTEN.is_on() {
        bring_ids(fabric, sites, needed).await?;
    }
    let (mut copied, since) = (Copied::default(), fabric.now());
    let per_batch = pace.reads * READ_BYTES / REGISTER_SIZE;
    let mut first = 0;
    while first < spec.blocks {
        let count = per_batch.min(spec.blocks - first);
        let tags = tags(fabric, sites, first, count).await;
        check(sites, needed)?;
        let early = early.map(|early| &early[first as usize..][..count as usize]);
        let mut copies = Vec::new();
        for at in 0..count {
            copies.extend(copy_of(sites, &tags, at as usize, first + at, needed, early));
        }
        for group in copies.chunks(COPIES) {
            let done = all(group.iter().map(|copy| copy.make(fabric, sites, &spec))).await;
            for (copy, done) in group.iter().zip(done) {
                match done {
                    Ok(()) => copied.blocks += copy.to.len() as u64,
                    Err((site, error)) => sites[site].failure = Some(error),
                }
            }
            copied.bytes = copied.blocks * u64::from(spec.block);
            if let Some(rate) = pace.bytes_per_second {
                let due = Duration::from_secs_f64(copied.bytes as f64 / rate.max(1) as f64);
                let left = (since + due).saturating_sub(fabric.now());
                if !left.is_zero() {
                    fabric.sleep(left).await;
                }
            }
        }
        check(sites, needed)?;
        if copies.iter().any(|copy| copy.sites().any(|site| sites[site].failure.is_some())) {
            continue;
        }
        first += count;
        (pace.progress)(first, spec.blocks);
    }
    Ok(copied)
}

/// Reads the highest tag of each block at the sources among `sites`.
///
/// # Errors
/// A source failed, or there is none.
pub(super) async fn newest_tags<F: Fabric>(fabric: &F, sites: &mut [Site]) -> Result<Vec<Tag>, BlocksError> {
    let blocks = match sites.first() {
        Some(site) => site.table.spec.blocks,
        None => return Err(BlocksError::Damaged("a replacement without replicas")),
    };
    let (mut newest, per_batch) = (Vec::new(), READS * READ_BYTES / REGISTER_SIZE);
    for first in (0..blocks).step_by(per_batch as usize) {
        let count = per_batch.min(blocks - first);
        let tags = tags(fabric, sites, first, count).await;
        if let Some(failure) = sites.iter().find_map(|site| site.failure.clone()) {
            return Err(failure);
        }
        newest.extend((0..count as usize).map(|at| {
            let at_sites = tags.iter().flatten().map(|tags| tags[at]);
            at_sites.max().unwrap_or(Tag::NONE)
        }));
    }
    Ok(newest)
}

/// Checks that enough sites are left.
fn check(sites: &[Site], needed: Needed) -> Result<(), BlocksError> {
    let left = |is: fn(&Site) -> bool| sites.iter().filter(|site| site.failure.is_none() && is(site)).count();
    if left(|site| site.is_source) >= needed.sources && left(|site| site.is_target) >= needed.targets {
        return Ok(());
    }
    let failure = sites.iter().find_map(|site| site.failure.clone());
    Err(failure.unwrap_or(BlocksError::Damaged("a replacement with too few replicas")))
}

/// Reads the tags of `count` blocks from block `first` on at all sites. A site that fails has `None`.
async fn tags<F: Fabric>(fabric: &F, sites: &mut [Site], first: u64, count: u64) -> Vec<Option<Vec<Tag>>> {
    let read = read_all(fabric, sites, |table| table.register(first), count * REGISTER_SIZE).await;
    let tag =
        |register: &[u8]| Register::read_from_bytes(register).map_or(Tag::NONE, |register| register.tag);
    read.into_iter()
        .map(|bytes| Some(bytes?.chunks_exact(REGISTER_SIZE as usize).map(tag).collect()))
        .collect()
}

/// Reads `len` bytes of the table at all sites that have not failed, at the same time.
async fn read_all<F: Fabric>(
    fabric: &F,
    sites: &mut [Site],
    at: impl Fn(&Table) -> Addr,
    len: u64,
) -> Vec<Option<Vec<u8>>> {
    let offsets = || (0..len).step_by(READ_BYTES as usize);
    let reads = sites.iter().filter(|site| site.failure.is_none()).flat_map(|site| {
        let (node, table, at) = (site.node, site.table, at(&site.table));
        offsets().map(move |offset| async move {
            let (mut chain, mut reply) = (ChainBuf::new(), Reply::new());
            let access = Access { node, table, chain: &mut chain, reply: &mut reply };
            read_bytes(fabric, access, at.plus(offset), READ_BYTES.min(len - offset)).await
        })
    });
    let mut reads = all(reads).await.into_iter();
    let mut found = Vec::with_capacity(sites.len());
    for site in sites {
        if site.failure.is_some() {
            found.push(None);
            continue;
        }
        let mut bytes = Vec::with_capacity(len as usize);
        for read in reads.by_ref().take(offsets().count()) {
            match read {
                Ok(piece) => bytes.extend(piece),
                Err(error) => site.failure = Some(error),
            }
        }
        found.push(Some(bytes).filter(|_| site.failure.is_none()));
    }
    found
}

async fn read_bytes<F: Fabric>(
    fabric: &F,
    access: Access<'_>,
    at: Addr,
    len: u64,
) -> Result<Vec<u8>, BlocksError> {
    let Access { node, table, chain, reply } = access;
    let mut chain = chain.begin(table.key);
    let bytes: Out<[u8]> = chain.also(read(at, len as u32));
    fabric.run(node, &chain, reply).await?;
    let bytes = reply.get(bytes).map_err(BlocksError::Refused)?;
    if bytes.len() as u64 == len { Ok(bytes.to_vec()) } else { Err(BlocksError::Damaged("a short table")) }
}

/// A block to copy from one site to others, by their indices.
struct Copy {
    block: u64,
    from: usize,
    to: Vec<usize>,
}

/// Returns the copy that block `block` needs, whose tags are those with index `at`. None if the newest is at enough
/// targets.
fn copy_of(
    sites: &[Site],
    tags: &[Option<Vec<Tag>>],
    at: usize,
    block: u64,
    needed: Needed,
    early: Option<&[Tag]>,
) -> Option<Copy> {
    let tags = || {
        sites
            .iter()
            .zip(tags)
            .enumerate()
            .filter_map(|(index, (site, tags))| Some((index, site, tags.as_ref()?[at])))
    };
    let (from, _, newest) = tags().filter(|(_, site, _)| site.is_source).max_by_key(|(_, _, tag)| *tag)?;
    let newest = early.map_or(newest, |early| early[at]);
    let targets = || tags().filter(|(_, site, _)| site.is_target);
    let missing = needed.targets.saturating_sub(targets().filter(|(_, _, tag)| *tag >= newest).count());
    let to: Vec<usize> =
        targets().filter(|(_, _, tag)| *tag < newest).map(|(index, _, _)| index).take(missing).collect();
    (newest != Tag::NONE && !to.is_empty()).then_some(Copy { block, from, to })
}

impl Copy {
    fn sites(&self) -> impl Iterator<Item = usize> {
        self.to.iter().copied().chain([self.from])
    }

    /// Makes the copy. The error names the site that failed.
    async fn make<F: Fabric + Clock>(
        &self,
        fabric: &F,
        sites: &[Site],
        spec: &Spec,
    ) -> Result<(), (usize, BlocksError)> {
        let (mut chain, mut reply) = (ChainBuf::new(), Reply::new());
        let Site { node, table, .. } = sites[self.from];
        let access = Access { node, table, chain: &mut chain, reply: &mut reply };
        let failed = |error| (self.from, error);
        let found = read_block(fabric, access, self.block).await.map_err(failed)?;
        let bytes = match found.bytes {
            Some(bytes) => reply.get(bytes).map_err(|status| failed(BlocksError::Refused(status)))?.to_vec(),
            None => vec![0; spec.block as usize],
        };
        let class =
            Class::for_len(spec.block as usize).ok_or((self.from, BlocksError::Damaged("a long block")))?;
        for &to in &self.to {
            let Site { node, table, .. } = sites[to];
            let access = Access { node, table, chain: &mut chain, reply: &mut reply };
            let installed = install(fabric, access, class.list(), self.block, &found.tag, &bytes).await;
            installed.map_err(|error| (to, error))?;
        }
        Ok(())
    }
}

/// Raises the highest writer id of enough targets to that of the sources. So no client claims an id that was claimed.
async fn bring_ids<F: Fabric>(fabric: &F, sites: &mut [Site], needed: Needed) -> Result<(), BlocksError> {
    loop {
        let read = read_all(fabric, sites, Table::highest, ID_SIZE).await;
        check(sites, needed)?;
        let number = |index: &usize| Some(U64::read_from_bytes(read[*index].as_ref()?).ok()?.get());
        let highest =
            (0..sites.len()).filter(|&index| sites[index].is_source).filter_map(|at| number(&at)).max();
        let Some(highest) = highest else { return Ok(()) };
        let is_raised = |index: &usize| number(index).is_some_and(|number| number >= highest);
        let targets = || (0..sites.len()).filter(|&index| sites[index].is_target);
        let missing = needed.targets.saturating_sub(targets().filter(is_raised).count());
        let lacking: Vec<usize> = targets()
            .filter(|index| !is_raised(index) && sites[*index].failure.is_none())
            .take(missing)
            .collect();
        for &index in &lacking {
            sites[index].failure = claim(fabric, sites[index].access(), highest).await.err();
        }
        check(sites, needed)?;
        if lacking.iter().all(|&index| sites[index].failure.is_none()) {
            return Ok(());
        }
    }
}
