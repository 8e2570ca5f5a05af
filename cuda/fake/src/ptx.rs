//! Reads PTX: what clang and nvcc write for our kernels, and nothing that would round otherwise than IEEE 754 says.

use std::collections::HashMap;

use crate::arithmetic::{Function, function};

/// A kernel, ready to run.
#[derive(Debug)]
pub(crate) struct Kernel {
    pub name: String,
    /// Offset and size of each parameter.
    pub parameters: Vec<(usize, usize)>,
    pub code: Vec<Instruction>,
    /// Registers that aren't constants.
    pub registers: usize,
    /// What follows the registers: the constants of the code.
    pub constants: Vec<u64>,
    /// Bytes of memory shared by a block.
    pub shared: usize,
    pub has_barrier: bool,
    pub threads: u32,
}

/// An operand: a place in the register file.
pub(crate) type Place = u32;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Instruction {
    /// Runs only if this predicate holds, or doesn't.
    pub guard: Option<(Place, bool)>,
    pub op: Op,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Op {
    One(fn(u64) -> u64, Place, Place),
    Two(fn(u64, u64) -> u64, Place, [Place; 2]),
    Three(fn(u64, u64, u64) -> u64, Place, [Place; 3]),
    Special(Special, Place),
    /// Bytes of an element, number of elements, where to, base register, offset.
    Load(Space, Width, [Place; 4], Place, i64),
    Store(Space, Width, [Place; 4], Place, i64),
    LoadParameter(Width, [Place; 4], Place, i64),
    Branch(usize),
    Barrier,
    Return,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Space {
    Global,
    Shared,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Width {
    pub bytes: usize,
    pub elements: usize,
    /// Whether the value is sign-extended.
    pub signed: bool,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Special {
    Thread,
    Block,
    BlockY,
    Threads,
    Blocks,
}

type Parsed<T> = Result<T, String>;

/// All kernels of a module.
pub(crate) fn parse(text: &str) -> Parsed<Vec<Kernel>> {
    let mut kernels = Vec::new();
    let mut shared = Shared::default();
    let mut rest = text;
    while let Some(start) = rest.find(['.', '/']) {
        rest = &rest[start..];
        if rest.starts_with("//") {
            rest = rest.split_once('\n').map_or("", |(_, after)| after);
        } else if let Some(body) = rest.strip_prefix(".visible .entry ").or_else(|| rest.strip_prefix(".entry ")) {
            let (head, after) = body.split_once("\n{").ok_or("an entry without a body")?;
            let (code, after) = after.split_once("\n}").ok_or("a body without an end")?;
            kernels.push(Reader::kernel(head, code, &shared)?);
            rest = after;
        } else {
            let (line, after) = rest.split_once('\n').unwrap_or((rest, ""));
            if line.contains(".func") {
                return Err(format!("a function that isn't inlined: {line}"));
            }
            if line.contains(".shared ") {
                shared.declare(line)?;
            }
            rest = after;
        }
    }
    Ok(kernels)
}

/// Arrays in the memory that a block shares, by name.
#[derive(Debug, Default, Clone)]
struct Shared {
    places: HashMap<String, usize>,
    bytes: usize,
}

impl Shared {
    fn declare(&mut self, line: &str) -> Parsed<()> {
        let (name, size) = array(line).ok_or_else(|| format!("shared memory: {line}"))?;
        self.bytes = self.bytes.next_multiple_of(16);
        self.places.insert(name.into(), self.bytes);
        self.bytes += size;
        Ok(())
    }
}

/// Name and size of a declared array of bytes.
fn array(line: &str) -> Option<(&str, usize)> {
    let (before, size) = line.split_once('[')?;
    let size = size.split_once(']')?.0.parse().ok()?;
    Some((before.split_whitespace().last()?, size))
}

struct Reader {
    names: HashMap<String, Place>,
    constants: HashMap<u64, Place>,
    values: Vec<u64>,
    parameters: HashMap<String, usize>,
    shared: Shared,
}

/// Where constants are numbered from until the number of registers is known.
const CONSTANT: Place = 1 << 24;

impl Reader {
    fn kernel(head: &str, code: &str, shared: &Shared) -> Parsed<Kernel> {
        let (name, head) = head.split_once('(').ok_or("an entry without parameters")?;
        let (list, directives) = head.rsplit_once(')').ok_or("parameters without an end")?;
        let mut reader = Reader {
            names: HashMap::new(),
            constants: HashMap::new(),
            values: Vec::new(),
            parameters: HashMap::new(),
            shared: shared.clone(),
        };
        let parameters = reader.parameters(list)?;
        let threads = directives
            .split_once(".maxntid")
            .and_then(|(_, n)| n.trim().split([',', ' ', '\n']).next()?.parse().ok());
        let wrong = |line: &str, why: String| format!("{name}: `{line}`: {why}");
        // Labels first, then what is between them.
        let (mut labels, mut lines) = (HashMap::new(), Vec::new());
        for line in code.lines() {
            let line = line.split_once("//").map_or(line, |(before, _)| before).trim();
            if let Some(label) = line.strip_suffix(':') {
                labels.insert(label, lines.len());
            } else if line.contains(".shared ") {
                reader.shared.declare(line)?;
            } else if !line.is_empty() && !line.starts_with('.') {
                lines.push(line.strip_suffix(';').ok_or_else(|| wrong(line, "more than a line".into()))?);
            }
        }
        let read = |line: &&str| reader.instruction(line, &labels).map_err(|why| wrong(line, why));
        let mut code = lines.iter().map(read).collect::<Parsed<Vec<_>>>()?;
        let registers = reader.names.len();
        code.iter_mut().for_each(|i| i.op.settle(registers as Place));
        Ok(Kernel {
            name: name.trim().into(),
            parameters,
            has_barrier: code.iter().any(|i| matches!(i.op, Op::Barrier)),
            code,
            registers,
            constants: reader.values,
            shared: reader.shared.bytes,
            threads: threads.unwrap_or(1024),
        })
    }

    fn parameters(&mut self, list: &str) -> Parsed<Vec<(usize, usize)>> {
        let (mut found, mut offset) = (Vec::new(), 0_usize);
        for line in list.split(',').map(str::trim).filter(|line| !line.is_empty()) {
            let (size, align, name) = if let Some((name, size)) = array(line) {
                let align = line
                    .split_once(".align ")
                    .and_then(|(_, a)| a.split_whitespace().next()?.parse().ok());
                (size, align.unwrap_or(1), name)
            } else {
                let words: Vec<&str> = line.split_whitespace().collect();
                let &[".param", kind, name] = &words[..] else {
                    return Err(format!("parameter {line}"));
                };
                let size = width(kind.trim_start_matches('.')).ok_or_else(|| format!("parameter {line}"))?.0;
                (size, size, name)
            };
            offset = offset.next_multiple_of(align);
            self.parameters.insert(name.into(), offset);
            found.push((offset, size));
            offset += size;
        }
        Ok(found)
    }

    fn instruction(&mut self, line: &str, labels: &HashMap<&str, usize>) -> Parsed<Instruction> {
        let (guard, line) = match line.strip_prefix('@') {
            Some(guarded) => {
                let (guard, line) = guarded.split_once(|c: char| c.is_whitespace()).ok_or("nothing to guard")?;
                let (name, holds) = guard.strip_prefix('!').map_or((guard, true), |name| (name, false));
                (Some((self.register(name), holds)), line.trim())
            }
            None => (None, line),
        };
        let (op, operands) = line.split_once(|c: char| c.is_whitespace()).unwrap_or((line, ""));
        let operands = split(operands);
        let parts: Vec<&str> = op.split('.').collect();
        let op = match parts[0] {
            "bra" => {
                let label = operands.first().ok_or("no label")?;
                Op::Branch(*labels.get(label.as_str()).ok_or("no such label")?)
            }
            "ret" => Op::Return,
            "bar" => Op::Barrier,
            "ld" | "st" => self.access(&parts, &operands)?,
            "mov" if operands[1].starts_with('{') => return Err("packing registers".into()),
            "mov" => match special(&operands[1]) {
                Some(special) => Op::Special(special, self.register(&operands[0])),
                None => Op::One(
                    |x| x,
                    self.register(&operands[0]),
                    self.operand(&operands[1], parts.last().unwrap_or(&""))?,
                ),
            },
            _ => self.arithmetic(op, &operands)?,
        };
        Ok(Instruction { guard, op })
    }

    fn arithmetic(&mut self, op: &str, operands: &[String]) -> Parsed<Op> {
        let function = function(op)?;
        let kind = op.rsplit('.').next().unwrap_or("");
        let target = self.register(operands.first().ok_or("no operands")?);
        let sources = operands[1..]
            .iter()
            .map(|operand| self.operand(operand, kind))
            .collect::<Parsed<Vec<_>>>()?;
        match (function, &sources[..]) {
            (Function::One(f), &[a]) => Ok(Op::One(f, target, a)),
            (Function::Two(f), &[a, b]) => Ok(Op::Two(f, target, [a, b])),
            (Function::Three(f), &[a, b, c]) => Ok(Op::Three(f, target, [a, b, c])),
            _ => Err(format!("{} operands", sources.len())),
        }
    }

    fn access(&mut self, parts: &[&str], operands: &[String]) -> Parsed<Op> {
        let kind = parts.last().copied().unwrap_or("");
        let (bytes, signed) = width(kind).ok_or("an unknown type")?;
        let elements = if parts.contains(&"v2") {
            2
        } else if parts.contains(&"v4") {
            4
        } else {
            1
        };
        let is_load = parts[0] == "ld";
        let (values, address) = if is_load {
            (&operands[0], &operands[1])
        } else {
            (&operands[1], &operands[0])
        };
        let names = split(values.trim_matches(['{', '}']));
        if names.len() != elements {
            return Err(format!("{} registers for {elements} elements", names.len()));
        }
        let mut places = [0; 4];
        for (place, name) in places.iter_mut().zip(&names) {
            *place = if is_load { self.register(name) } else { self.operand(name, kind)? };
        }
        let width = Width { bytes, elements, signed };
        let address = address.trim_start_matches('[').trim_end_matches(']');
        let (base, offset) = match address.split_once('+') {
            Some((base, offset)) => (base, offset.parse::<i64>().map_err(|e| e.to_string())?),
            None => (address, 0),
        };
        if parts[1] == "param" && is_load {
            let base = self.operand(base, "u64")?;
            return Ok(Op::LoadParameter(width, places, base, offset));
        }
        let space = match parts[1] {
            "global" => Space::Global,
            "shared" => Space::Shared,
            other => return Err(format!("memory that isn't global or shared: {other}")),
        };
        let base = self.operand(base, "u64")?;
        Ok(if is_load {
            Op::Load(space, width, places, base, offset)
        } else {
            Op::Store(space, width, places, base, offset)
        })
    }

    fn register(&mut self, name: &str) -> Place {
        let next = self.names.len() as Place;
        *self.names.entry(name.into()).or_insert(next)
    }

    fn operand(&mut self, text: &str, kind: &str) -> Parsed<Place> {
        if text.starts_with('%') {
            return Ok(self.register(text));
        }
        let bits = if let Some(hex) = text.strip_prefix("0f") {
            u64::from_str_radix(hex, 16).map_err(|e| e.to_string())?
        } else if let Some(hex) = text.strip_prefix("0d") {
            u64::from_str_radix(hex, 16).map_err(|e| e.to_string())?
        } else if let Some(&place) = self.shared.places.get(text).or_else(|| self.parameters.get(text)) {
            place as u64
        } else {
            let number = text.parse::<i128>().map_err(|_| format!("operand {text}"))? as u64;
            match width(kind).map_or(8, |w| w.0) {
                4 => u64::from(number as u32),
                2 => u64::from(number as u16),
                1 => u64::from(number as u8),
                _ => number,
            }
        };
        let next = CONSTANT + self.values.len() as Place;
        let place = *self.constants.entry(bits).or_insert(next);
        if place == next {
            self.values.push(bits);
        }
        Ok(place)
    }
}

impl Op {
    /// Puts constants behind the registers.
    fn settle(&mut self, registers: Place) {
        let settle = |place: &mut Place| {
            if *place >= CONSTANT {
                *place = *place - CONSTANT + registers;
            }
        };
        match self {
            Op::One(_, _, a) => settle(a),
            Op::Two(_, _, operands) => operands.iter_mut().for_each(settle),
            Op::Three(_, _, operands) => operands.iter_mut().for_each(settle),
            Op::Load(_, _, _, base, _) | Op::LoadParameter(_, _, base, _) => settle(base),
            Op::Store(_, _, values, base, _) => {
                values.iter_mut().for_each(settle);
                settle(base);
            }
            Op::Special(..) | Op::Branch(_) | Op::Barrier | Op::Return => {}
        }
    }
}

/// Operands between commas, without those within braces.
fn split(text: &str) -> Vec<String> {
    let (mut parts, mut depth) = (vec![String::new()], 0);
    for c in text.chars() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        match parts.last_mut() {
            Some(last) if c != ',' || depth > 0 => last.push(c),
            _ => parts.push(String::new()),
        }
    }
    parts
        .iter()
        .map(|part| part.trim().to_owned())
        .filter(|part| !part.is_empty())
        .collect()
}

/// Bytes of a type, and whether it has a sign that loads extend.
pub(crate) fn width(kind: &str) -> Option<(usize, bool)> {
    let signed = kind.starts_with('s');
    let bytes = match kind {
        "u8" | "s8" | "b8" => 1,
        "u16" | "s16" | "b16" => 2,
        "u32" | "s32" | "b32" | "f32" => 4,
        "u64" | "s64" | "b64" | "f64" => 8,
        _ => return None,
    };
    Some((bytes, signed))
}

fn special(name: &str) -> Option<Special> {
    Some(match name {
        "%tid.x" => Special::Thread,
        "%ctaid.x" => Special::Block,
        "%ctaid.y" => Special::BlockY,
        "%ntid.x" => Special::Threads,
        "%nctaid.x" => Special::Blocks,
        _ => return None,
    })
}
