//! The first ranks of the nodes, in a ring of connections, while a job of srun starts.
//!
//! Nobody can tell another where it listens, so that follows from the job: each tries a few ports that a hash of it gives.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{ErrorKind, Read, Result, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::roll::{Entry, Rank};
use super::{Shared, died};
use crate::config::launcher::{environment, job, local_rank, nodes};
use crate::transport::Loss;
use crate::transport::mpi::watch::{link, lock};

/// How often a node looks: who dies before another has met it may go unnoticed.
const TICK: Duration = Duration::from_millis(50);
/// Ports that a node may take.
const PORTS: usize = 4;
/// Where they lie: below those that the kernel gives out.
const RANGE: (u16, u16) = (12_000, 20_000);
/// The longest text that is taken from another node.
const TEXT: usize = 16 << 10;
/// Connections that were made to this node: its watcher's, made again perhaps, and strangers'.
const MOST: usize = 8;

/// This node's place.
#[derive(Debug)]
pub(super) struct Nodes {
    listener: TcpListener,
    /// The node that this one connects to, and its ports.
    next: (String, Vec<u16>),
    key: [u8; 16],
    links: Mutex<Links>,
}

#[derive(Debug, Default)]
struct Links {
    /// This rank has started: nothing is said any more.
    left: bool,
    /// What was told, also for those who come later.
    lost: Option<Entry>,
    next: Option<Link>,
    before: Vec<Link>,
}

/// A connection to another node.
#[derive(Debug)]
struct Link {
    stream: TcpStream,
    heard: Vec<u8>,
    /// How much of the key is still to come, before anything else counts.
    key: usize,
    /// Who is there, once it has said so.
    rank: Option<Rank>,
}

impl Nodes {
    /// For the first rank of a node that srun started on several; `None` for others, and where nothing can be listened at.
    pub(super) fn of(me: &Rank) -> Option<Nodes> {
        let same = |mpi: &str, slurm: &str| environment(mpi).is_none_or(|mpi| Some(mpi) == environment(slurm));
        // Not of srun, which only started the launcher.
        if !same("PMI_RANK", "SLURM_PROCID") || !same("PMI_SIZE", "SLURM_STEP_NUM_TASKS") || environment("OMPI_COMM_WORLD_RANK").is_some() {
            return None;
        }
        let (names, node) = nodes(environment)?;
        if names.len() < 2 || local_rank(environment) != Some(0) {
            return None;
        }
        let hash = |what: (&str, usize)| {
            let mut hash = DefaultHasher::new();
            (
                job(environment),
                environment("SLURM_STEP_NODELIST"),
                rustix::process::geteuid().as_raw(),
                what,
            )
                .hash(&mut hash);
            hash.finish()
        };
        let ports = |node: usize| {
            let port = |i: usize| RANGE.0 + (hash(("port", node * PORTS + i)) % u64::from(RANGE.1 - RANGE.0)) as u16;
            (0..PORTS).map(port).collect::<Vec<u16>>()
        };
        let [low, high] = ["low", "high"].map(|half| hash((half, 0)).to_le_bytes());
        let mut key = [0; 16];
        key[..8].copy_from_slice(&low);
        key[8..].copy_from_slice(&high);
        let place = |port| SocketAddr::from((IpAddr::from(Ipv4Addr::UNSPECIFIED), port));
        let listener = ports(node).into_iter().find_map(|port| TcpListener::bind(place(port)).ok());
        let listener = listener.filter(|listener| listener.set_nonblocking(true).is_ok());
        if listener.is_none() {
            log::warn!(
                "rank {}: none of its ports is free; a node without a rank that lives isn't noticed during the start",
                me.rank
            );
        }
        let next = (node + 1) % names.len();
        Some(Nodes {
            listener: listener?,
            next: (names[next].clone(), ports(next)),
            key,
            links: Mutex::default(),
        })
    }

    /// Tells the neighbours of a loss.
    pub(super) fn tell(&self, loss: &Loss) {
        let mut links = lock(&self.links);
        let entry = Entry::from(loss);
        links.say(&entry);
        links.lost = Some(entry);
    }

    /// Says goodbye.
    pub(super) fn leave(&self, me: &Rank) {
        let mut links = lock(&self.links);
        links.say(&Entry::Started(me.clone()));
        *links = Links {
            left: true,
            ..Links::default()
        };
    }

    /// Looks at all connections, takes new ones, and tries to get to the next node.
    fn look(&self, me: &Rank) -> Vec<Loss> {
        let alone = {
            let mut links = lock(&self.links);
            if links.left {
                return Vec::new();
            }
            while links.before.len() < MOST
                && let Ok((stream, _)) = self.listener.accept()
            {
                if let Ok(mut link) = Link::new(stream, self.key.len(), me) {
                    links.lost.iter().for_each(|lost| drop(link.say(lost)));
                    links.before.push(link);
                }
            }
            links.next.is_none()
        };
        // Outside of the lock, as it may block.
        let link = alone.then(|| self.connect(me).ok()).flatten();
        let mut links = lock(&self.links);
        if links.left {
            return Vec::new();
        }
        if let Some(mut link) = link {
            links.lost.iter().for_each(|lost| drop(link.say(lost)));
            links.next = Some(link);
        }
        let Links { next, before, .. } = &mut *links;
        let mut losses = Vec::new();
        if let Some(link) = next
            && !link.hear(&self.key, &mut losses)
        {
            *next = None;
        }
        before.retain_mut(|link| link.hear(&self.key, &mut losses));
        losses
    }

    fn connect(&self, me: &Rank) -> Result<Link> {
        let (host, ports) = &self.next;
        let place = (host.as_str(), 0).to_socket_addrs()?.find(SocketAddr::is_ipv4);
        let mut address = place.ok_or(ErrorKind::NotFound)?;
        let mut error = ErrorKind::NotFound.into();
        for &port in ports {
            address.set_port(port);
            match TcpStream::connect_timeout(&address, link::CONNECT) {
                Ok(stream) => {
                    (&stream).write_all(&self.key)?;
                    return Link::new(stream, 0, me);
                }
                // Other ports of a node that is silent take as long.
                Err(e) if e.kind() == ErrorKind::TimedOut => return Err(e),
                Err(e) => error = e,
            }
        }
        Err(error)
    }

    /// The node that this one has not found, if there is one.
    pub(super) fn missing(&self) -> Option<&str> {
        let links = lock(&self.links);
        (!links.left && links.next.is_none()).then_some(&self.next.0)
    }
}

impl Links {
    fn say(&mut self, entry: &Entry) {
        for link in self.next.iter_mut().chain(&mut self.before).filter(|link| link.key == 0) {
            // Who can't be told finds that this process has ended.
            let _ = link.say(entry);
        }
    }
}

impl Link {
    fn new(stream: TcpStream, key: usize, me: &Rank) -> Result<Link> {
        let stream = link::prepared(stream)?;
        stream.set_nonblocking(true)?;
        let mut link = Link {
            stream,
            heard: Vec::new(),
            key,
            rank: None,
        };
        link.say(&Entry::Begins(me.clone()))?;
        Ok(link)
    }

    fn say(&mut self, entry: &Entry) -> Result<()> {
        let mut line = serde_json::to_vec(entry)?;
        line.push(b'\n');
        self.stream.write_all(&line)
    }

    /// Hears what has come; whether the connection is to be kept.
    fn hear(&mut self, key: &[u8], losses: &mut Vec<Loss>) -> bool {
        let mut open = true;
        while open && self.heard.len() < TEXT {
            let mut bytes = [0; 1024];
            match self.stream.read(&mut bytes) {
                Ok(0) => open = false,
                Ok(count) => self.heard.extend_from_slice(&bytes[..count]),
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(_) => open = false,
            }
        }
        if self.key > 0 && self.heard.len() >= self.key {
            if self.heard[..self.key] != *key {
                return false;
            }
            self.heard.drain(..self.key);
            self.key = 0;
        }
        if self.key > 0 {
            return open;
        }
        while let Some(end) = self.heard.iter().position(|&b| b == b'\n') {
            let line: Vec<u8> = self.heard.drain(..=end).collect();
            match serde_json::from_slice(&line) {
                Ok(Entry::Begins(rank)) => self.rank = Some(rank),
                Ok(Entry::Lost { text, died, hops }) => losses.push(Loss { text, died, hops }),
                // It needs no watch any more. Nor does a stranger.
                Ok(Entry::Started(_)) | Err(_) => return false,
            }
        }
        if !open && let Some(rank) = &self.rank {
            losses.push(died(rank, "its connection has ended before all ranks were up"));
        }
        open && self.heard.len() < TEXT
    }
}

/// Looks at the neighbours until this rank has started; also after a loss, as others may come later.
pub(super) fn watch(shared: &Arc<Shared>) {
    let Some(nodes) = &shared.nodes else { return };
    loop {
        if lock(&nodes.links).left {
            return;
        }
        for loss in nodes.look(&shared.me) {
            let over = |limit: Duration| {
                std::thread::sleep(limit);
                lock(&nodes.links).left
            };
            shared.lost(&loss, over);
        }
        std::thread::sleep(TICK);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(rank: u32) -> Rank {
        Rank { rank, ..Rank::own(0) }
    }

    /// Two nodes that have met.
    fn met() -> [Nodes; 2] {
        let listeners = [0, 1].map(|_| link::listen().unwrap());
        let [a, b] = [0, 1].map(|i: usize| listeners[i].local_addr().unwrap().port());
        let mut ports = [b, a].into_iter();
        let nodes = listeners.map(|listener| Nodes {
            listener,
            next: ("localhost".into(), ports.next().into_iter().collect()),
            key: [7; 16],
            links: Mutex::default(),
        });
        let all_known = |nodes: &Nodes| {
            let links = lock(&nodes.links);
            links.next.iter().chain(&links.before).filter(|link| link.rank.is_some()).count() == 2
        };
        while !nodes.iter().all(all_known) {
            for (i, node) in nodes.iter().enumerate() {
                assert!(node.look(&rank(i as u32)).is_empty());
            }
        }
        assert!(nodes[0].missing().is_none());
        nodes
    }

    /// What a node hears in the end.
    fn hears(nodes: &Nodes) -> Loss {
        loop {
            if let Some(loss) = nodes.look(&rank(0)).into_iter().next() {
                return loss;
            }
        }
    }

    #[test]
    fn an_end_without_a_goodbye_is_a_death() {
        let [a, b] = met();
        drop(b);
        let loss = hears(&a);
        assert!(loss.died && loss.hops == 0 && loss.text.starts_with("rank 1 on "), "{loss:?}");

        let [a, b] = met();
        b.leave(&rank(1));
        drop(b);
        for _ in 0..10 {
            assert!(a.look(&rank(0)).is_empty());
        }
        assert_eq!(a.missing(), Some("localhost"));
    }

    #[test]
    fn news_is_passed_on_and_strangers_have_none() {
        let [a, b] = met();
        let news = Loss {
            text: "rank 5 on n3 has died".into(),
            died: true,
            hops: 2,
        };
        b.tell(&news);
        let heard = hears(&a);
        assert_eq!((&heard.text, heard.died, heard.hops), (&news.text, true, 2));
        // Also by one who comes later.
        lock(&a.links).next = None;
        assert!(a.look(&rank(0)).is_empty());
        // It takes the new connection, and misses the old one.
        drop(b.look(&rank(1)));
        assert_eq!(hears(&a).text, news.text);

        let [a, _b] = met();
        let place = SocketAddr::from((Ipv4Addr::LOCALHOST, a.listener.local_addr().unwrap().port()));
        for text in [
            &b"no key, and more than sixteen bytes"[..],
            b"short",
            &[7; 16],
            b"\x07\x07\x07\x07\x07\x07\x07\x07\x07\x07\x07\x07\x07\x07\x07\x07what?\n",
        ] {
            let mut stranger = TcpStream::connect(place).unwrap();
            stranger.write_all(text).unwrap();
        }
        for _ in 0..10 {
            assert!(a.look(&rank(0)).is_empty());
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(lock(&a.links).before.len(), 1);
    }
}
