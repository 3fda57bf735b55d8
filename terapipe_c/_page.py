"""The page that Timeline.to_html writes: plain HTML and script, no network."""

PAGE = r"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>Pipeline timeline</title>
<style>
:root{--page:#f6f8fb;--panel:#fff;--lane:#eef2f7;--ink:#1c2430;--soft:#5b6675;--line:#d8dde6}
@media (prefers-color-scheme:dark){:root{--page:#0d1117;--panel:#12171f;--lane:#1b222d;--ink:#e6ebf2;--soft:#9aa7b8;--line:#2b3442}}
*{box-sizing:border-box}body{margin:0;padding:18px 22px;background:var(--page);color:var(--ink);
font:13px/1.45 system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}
h1{font-size:16px;margin:0 0 2px}p{margin:0 0 12px;color:var(--soft)}
.panel{background:var(--panel);border:1px solid var(--line);border-radius:8px;padding:10px;margin-bottom:14px}
canvas{display:block;width:100%;cursor:grab;touch-action:none}canvas:active{cursor:grabbing}
.key{display:flex;flex-wrap:wrap;gap:6px 18px;margin-top:8px}i{display:inline-block;width:12px;height:12px;border-radius:2px;
margin-right:6px;vertical-align:-1px}i.level{margin-right:1px}.soft{color:var(--soft)}
.bar{display:flex;height:12px;border-radius:3px;overflow:hidden;margin:6px 0}.bar span{min-width:1px}
table{border-collapse:collapse}td,th{padding:2px 14px 2px 0;text-align:right;font-variant-numeric:tabular-nums;font-weight:400}
th{color:var(--soft)}td:first-child,th:first-child{text-align:left}
#tip{position:fixed;pointer-events:none;display:none;background:var(--ink);color:var(--panel);padding:6px 9px;border-radius:6px;
font-size:12px;white-space:nowrap;z-index:2}
button{font:inherit;color:inherit;background:var(--lane);border:1px solid var(--line);border-radius:5px;
padding:2px 10px;cursor:pointer}
.cols{display:flex;flex-wrap:wrap;gap:14px}.cols .panel{flex:1 1 340px}
</style></head><body>
<h1>Pipeline timeline</h1><p id="head"></p>
<div class="panel"><canvas id="c"></canvas><div class="key" id="key"></div></div>
<p>Wheel: zoom. Drag: move. Arrow keys, + and −: the same. <button id="all">Show all</button></p>
<div class="cols"><div class="panel"><b>Why ranks idle</b><div class="bar" id="bar"></div><table id="why"></table></div>
<div class="panel"><b>Ranks</b><table id="ranks"></table></div></div>
<div id="tip"></div>
<script>
"use strict";
const D=/*DATA*/null;
const $=id=>document.getElementById(id),canvas=$("c"),g=canvas.getContext("2d");
const LEFT=64,TOP=24,lane=D.ranks<=16?28:D.ranks<=48?16:D.ranks<=128?9:5,gap=lane>9?4:1;
let from=0,to=D.makespan||1,drag=null,width=0;
const isMessage=new Set(D.messages);
function units(s){return s>=1?[1,"s"]:s>=1e-3?[1e-3,"ms"]:s>=1e-6?[1e-6,"us"]:[1e-9,"ns"]}
/* human_seconds of config.py: four digits, and then the unit. */
function time(s){const[m,e]=s.toExponential(3).split("e");if(s==0||+e<-12)return"0 s";
 const[d,n]=[[0,"s"],[3,"ms"],[6,"us"]].find(u=>+e>=-u[0])||[9,"ns"];return +(m+"e"+(+e+d))+" "+n}
/* human_bytes of config.py */
function bytes(b){if(b<1024)return b+" B";let s,n;
 for(n of["KiB","MiB","GiB","TiB"]){b/=1024;s=b.toFixed(2);if(+s<1024)break}return s+" "+n}
function css(name){return getComputedStyle(document.documentElement).getPropertyValue(name).trim()}
const shade=i=>D.chunk&&!D.unshaded.includes(D.op[i])?D.levels[D.chunk[i]]:D.micro[i]%4;
const X=t=>LEFT+(t-from)/(to-from)*(width-LEFT-8),T=x=>from+(x-LEFT)/(width-LEFT-8)*(to-from);
/* Of a rank's work (2 rank), or of what goes on beside it (2 rank + 1): until when there was something, as messages may overlap. */
const until=D.end.slice();D.begin.slice(0,-1).forEach((a,k)=>{
 for(let i=a+1;i<D.begin[k+1];i++)until[i]=Math.max(until[i-1],until[i])});
/* The first interval behind which something goes on at t; what ends before t may be among those that follow. */
function first(k,t){let a=D.begin[k],b=D.begin[k+1];while(a<b){const m=(a+b)>>1;if(until[m]<t)a=m+1;else b=m}return a}
function draw(){
 const ratio=devicePixelRatio||1,height=TOP+D.ranks*(lane+gap)+4;width=canvas.clientWidth;
 canvas.width=width*ratio;canvas.height=height*ratio;canvas.style.height=height+"px";g.setTransform(ratio,0,0,ratio,0,0);
 g.clearRect(0,0,width,height);g.font="11px system-ui,sans-serif";g.textBaseline="middle";
 const[u,n]=units(to-from),raw=(to-from)/u/Math.max(2,width/110),p=10**Math.floor(Math.log10(raw));
 const step=[1,2,5,10].map(m=>m*p).find(s=>s>=raw*(1-1e-9));
 g.strokeStyle=css("--line");g.fillStyle=css("--soft");g.textAlign="center";
 for(let i=Math.ceil(from/u/step);i*step*u<=to*(1+1e-12);i++){
  const x=X(i*step*u);g.beginPath();g.moveTo(x,TOP-5);g.lineTo(x,height);
  const label=+(i*step).toPrecision(10)+" "+n;  /* within the canvas */
  g.stroke();g.fillText(label,Math.min(x,width-g.measureText(label).width/2),9)}
 for(let r=0;r<D.ranks;r++){const y=TOP+r*(lane+gap);g.fillStyle=css("--lane");g.fillRect(LEFT,y,width-LEFT-8,lane);
  if(lane>9||r%4==0){g.fillStyle=css("--ink");g.textAlign="right";g.fillText("rank "+r,LEFT-8,y+lane/2)}
  g.textAlign="center";
  for(const k of[2*r,2*r+1]){let painted=-1,last="";
  for(let i=first(k,from);i<D.begin[k+1]&&D.start[i]<to;i++){
   if(D.end[i]<from)continue;
   const a=Math.max(LEFT,X(D.start[i])),b=Math.min(width-8,X(D.end[i])),w=b-a,colour=D.colours[D.op[i]][shade(i)];
   if(b<painted+.4&&colour==last)continue;
   const low=isMessage.has(D.op[i]),h=low?lane*.22:lane;
   g.fillStyle=colour;g.fillRect(a,low?y+lane-h:y,Math.max(.5,w-(w>3?.7:0)),h);painted=b;last=colour;
   const word=D.alone.includes(D.op[i])?D.ops[D.op[i]]:D.micro[i]+(sliced?"."+D.slice[i]:"");
   if(!low&&lane>12&&w>7*word.length+4){g.fillStyle="#0c1420";g.fillText(word,(a+b)/2,y+lane/2)}}}}
}
const sliced=D.slice.some(s=>s>0);
function clamp(){const least=Math.max(D.makespan*1e-7,1e-12);let span=Math.min(Math.max(to-from,least),D.makespan||1);
 if(from<0)from=0;if(from+span>D.makespan)from=Math.max(0,D.makespan-span);to=from+span}
let asked=false;function show(){clamp();if(!asked){asked=true;requestAnimationFrame(()=>{asked=false;draw()})}}
function zoom(at,factor){from=at-(at-from)*factor;to=at+(to-at)*factor;show()}
canvas.addEventListener("wheel",e=>{e.preventDefault();
 if(Math.abs(e.deltaX)>Math.abs(e.deltaY)){const d=e.deltaX/(width-LEFT)*(to-from);from+=d;to+=d;show()}
 else zoom(T(e.offsetX),Math.exp(e.deltaY*.0015))},{passive:false});
canvas.addEventListener("pointerdown",e=>{drag=[e.clientX,from,to];canvas.setPointerCapture(e.pointerId)});
canvas.addEventListener("pointerup",()=>drag=null);
canvas.addEventListener("pointermove",e=>{
 if(drag){const d=(drag[0]-e.clientX)/(width-LEFT-8)*(drag[2]-drag[1]);from=drag[1]+d;to=drag[2]+d;$("tip").style.display="none";
  return show()}
 const r=Math.floor((e.offsetY-TOP)/(lane+gap)),t=T(e.offsetX),tip=$("tip");
 const at=k=>{let f=-1;for(let i=first(k,t);i<D.begin[k+1]&&D.start[i]<=t;i++)if(D.end[i]>=t)f=i;return f};
 let i=-1;if(r>=0&&r<D.ranks&&e.offsetX>=LEFT){
  const low=e.offsetY-TOP-r*(lane+gap)>.78*lane;i=at(2*r+low);if(i<0)i=at(2*r+!low)}
 if(i>=0){
  tip.innerHTML="<b>"+D.names[D.op[i]]+"</b> · rank "+r+" · stage "+D.stage[i]+(D.chunk?" (chunk "+D.chunk[i]+")":"")+
   " · micro-batch "+D.micro[i]+" · slice "+D.slice[i]+
   "<br>"+time(D.start[i])+" to "+time(D.end[i])+" · takes "+time(D.end[i]-D.start[i]);
  tip.style.display="block";tip.style.left=Math.min(e.clientX+14,innerWidth-tip.offsetWidth-8)+"px";tip.style.top=e.clientY+16+"px"}
 else tip.style.display="none"});
canvas.addEventListener("pointerleave",()=>$("tip").style.display="none");
canvas.addEventListener("dblclick",()=>{from=0;to=D.makespan;show()});$("all").onclick=()=>{from=0;to=D.makespan;show()};
addEventListener("keydown",e=>{const m=(from+to)/2,d=(to-from)*.2;
 if(e.key=="ArrowLeft"){from-=d;to-=d}else if(e.key=="ArrowRight"){from+=d;to+=d}else if(e.key=="+"||e.key=="=")return zoom(m,.7);
 else if(e.key=="-")return zoom(m,1/.7);else return;show()});
addEventListener("resize",draw);matchMedia("(prefers-color-scheme:dark)").addEventListener("change",draw);
$("head").textContent=D.headline;
const seen=new Set(D.op);D.ops.forEach((op,i)=>{if(seen.has(i))$("key").insertAdjacentHTML("beforeend",
 `<span><i style="background:${D.colours[i][0]}"></i>${op} <span class="soft">${D.names[i]}</span></span>`)});
if(D.chunk)$("key").insertAdjacentHTML("beforeend","<span>"+[...new Set(D.levels)].map(l=>
 `<i class="level" style="background:${D.colours[Math.min(...seen)][l]}"></i>`).join("")+
 ` <span class="soft">${D.chunks}</span></span>`);
const idle=D.bubbles.reduce((s,b)=>s+b[1],0);
for(const[name,s,colour]of D.bubbles){
 $("bar").insertAdjacentHTML("beforeend",`<span style="background:${colour};flex:${s/idle}"></span>`);
 $("why").insertAdjacentHTML("beforeend",
 `<tr><td><i style="background:${colour}"></i>${name}</td><td>${time(s)}</td>`+
 `<td class="soft">${(100*s/idle).toFixed(1)} %</td></tr>`)}
$("ranks").innerHTML="<tr><th>rank</th><th>busy</th><th></th>"+(D.peak.some(p=>p)?"<th>peak</th>":"")+"</tr>"+
 D.busy.slice(0,256).map((b,r)=>
 `<tr><td>${r}</td><td>${time(b)}</td><td class="soft">${(100*b/(D.makespan||1)).toFixed(1)} %</td>`+
 (D.peak.some(p=>p)?`<td>${bytes(D.peak[r])}</td>`:"")+"</tr>").join("")+
 (D.ranks>256?`<tr><td colspan="4" class="soft">… ${D.ranks-256} more ranks</td></tr>`:"");
draw();
</script></body></html>
"""
